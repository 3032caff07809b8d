"use strict";
(async () => {
  const unpacked = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (each) => each.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  try {
    const script = document.createElement("script");
    script.textContent = await unpacked("library");
    document.head.append(script);
    const range = (plot) => [plot.x_range.start, plot.x_range.end];
    let names = {}, whole = {}; // of the plots that are drawn: their elements, and the ranges that they had at first
    const draw = async () => {
      const { documents, items, ink, line } = JSON.parse(await unpacked("plots"));
      const before = Bokeh.documents[0]?.roots() ?? [];
      const changed = (plot) => plot.x_range.type === "Range1d" && String(range(plot)) !== String(whole[plot.id]);
      const ranges = Object.fromEntries(before.filter(changed).map((plot) => [names[plot.id], range(plot)]));
      const plots = [...document.querySelectorAll(".plot")];
      for (const plot of plots) plot.style.minHeight = `${plot.offsetHeight}px`; // the page keeps its place
      const style = getComputedStyle(document.documentElement);
      const painted = JSON.stringify(documents)
        .replaceAll(ink, style.getPropertyValue("--ink").trim())
        .replaceAll(line, style.getPropertyValue("--line").trim());
      [...Bokeh.index].forEach((view) => view.remove());
      Bokeh.documents.length = 0;
      await Bokeh.embed.embed_items(JSON.parse(painted), items);
      names = items[0].roots;
      whole = Object.fromEntries(Bokeh.documents[0].roots().map((plot) => [plot.id, range(plot)]));
      for (const plot of Bokeh.documents[0].roots()) {
        const [start, end] = ranges[names[plot.id]] ?? [];
        if (end !== undefined) plot.x_range.setv({ start, end });
      }
      for (const plot of plots) plot.style.minHeight = "";
      if (matchMedia("(pointer: coarse)").matches) // a finger scrolls the page; the buttons of a plot zoom
        for (const plot of Bokeh.documents[0].roots())
          for (const tool of plot.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = false;
      document.body.dataset.drawn = dark.matches ? "dark" : "light";
    };
    let drawing = draw();
    const redraw = () => (drawing = drawing.then(draw));
    dark.addEventListener("change", redraw);
    addEventListener("plots", redraw);
    await drawing;
  } catch (error) {
    document.getElementById("undrawn").hidden = false;
    throw error;
  }
})();
