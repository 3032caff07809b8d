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
    const { documents, items, ink, line } = JSON.parse(await unpacked("plots"));
    const draw = async () => {
      const style = getComputedStyle(document.documentElement);
      const painted = JSON.stringify(documents)
        .replaceAll(ink, style.getPropertyValue("--ink").trim())
        .replaceAll(line, style.getPropertyValue("--line").trim());
      [...Bokeh.index].forEach((view) => view.remove());
      Bokeh.documents.length = 0;
      await Bokeh.embed.embed_items(JSON.parse(painted), items);
      if (matchMedia("(pointer: coarse)").matches) // a finger scrolls the page; the buttons of a plot zoom
        for (const plot of Bokeh.documents[0].roots())
          for (const tool of plot.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = false;
      document.body.dataset.drawn = dark.matches ? "dark" : "light";
    };
    dark.addEventListener("change", draw);
    await draw();
  } catch (error) {
    document.getElementById("undrawn").hidden = false;
    throw error;
  }
})();
