"use strict";
(() => {
  const EVERY_MS = 2000;
  const parts = (root) => root.querySelectorAll("[data-part]");
  const known = new Map([...parts(document)].map((part) => [part.id, part.innerHTML])); // before plots are drawn in them
  let held = false;
  addEventListener("pointerdown", () => (held = true), true);
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (held = false), true);

  const say = (sentence) => (document.getElementById("problem").textContent = sentence);
  const place = (details) => {
    const section = details.closest("section");
    return section.querySelector("h2").textContent + [...section.querySelectorAll("details")].indexOf(details);
  };
  const scrolled = (box) => {
    const end = box.tagName === "PRE" && box.scrollTop + box.clientHeight > box.scrollHeight - 20; // a log follows its end
    return end ? Number.MAX_SAFE_INTEGER : box.scrollTop;
  };
  const swap = (here, fresh) => {
    const was = new Map([...here.querySelectorAll("details")].map((each) => [place(each), each]));
    const boxes = [];
    for (const each of fresh.querySelectorAll("details")) {
      const before = was.get(place(each));
      if (!before) continue;
      each.open = before.open;
      boxes.push([each.querySelector("pre, .scroll"), scrolled(before.querySelector("pre, .scroll"))]);
    }
    for (const plot of fresh.querySelectorAll(".plot")) {
      const drawn = document.getElementById(plot.id);
      if (drawn) plot.replaceWith(drawn); // until the new one is drawn
    }
    here.replaceChildren(...fresh.childNodes);
    for (const [box, top] of boxes) box.scrollTop = top;
  };
  const look = async () => {
    const text = await (await fetch("?part", { cache: "no-store" })).text();
    const fresh = new DOMParser().parseFromString(text, "text/html");
    if (!fresh.getElementById("problem")) return say(text); // the token is not that of this server
    if (held || getSelection().type === "Range") return;
    let redraw = false;
    for (const part of parts(fresh)) {
      const here = document.getElementById(part.id), html = part.innerHTML;
      if (!here) return location.reload();
      if (known.get(part.id) === html && part.id !== "problem") continue;
      known.set(part.id, html);
      swap(here, part);
      redraw ||= part.id === "report" || part.id === "plots";
    }
    if (redraw) dispatchEvent(new Event("plots"));
  };
  const loop = async () => {
    if (!document.hidden) await look().catch(() => say("outlast ui cannot be reached; trying again"));
    setTimeout(loop, EVERY_MS);
  };
  setTimeout(loop, EVERY_MS);
  const log = /\/log\/\d+\/$/.test(location.pathname) && document.querySelector("pre");
  if (log) log.scrollTop = log.scrollHeight;
})();
