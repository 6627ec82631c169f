"use strict";
// values under the pointer: read from the paths of the chart, whose axes are in the figure's data attributes
for (const figure of document.querySelectorAll("figure[data-x0]")) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), box = svg.viewBox.baseVal;
  const [x0, x1, y0, y1] = ["x0", "x1", "y0", "y1"].map((name) => Number(figure.dataset[name]));
  const paths = new Map([...svg.querySelectorAll("path[data-label]")].map((path) => [path.dataset.label, path]));
  const lines = [...paths].map(([label, path]) => ({
    label,
    points: [...path.getAttribute("d").matchAll(/[ML]([\d.-]+) ([\d.-]+)/g)].map((each) => [Number(each[1]), Number(each[2])]),
  }));
  const reading = document.createElement("div"), text = document.createElement("span");
  reading.className = "reading";
  reading.hidden = true;
  reading.append(text);
  plot.append(reading);
  const show = (event) => {
    const area = svg.getBoundingClientRect();
    const place = Math.min(Math.max((event.clientX - area.left) / area.width, 0), 1) * box.width;
    const near = lines.filter((line) => line.points.length).map((line) => {
      const point = line.points.reduce((best, each) => (Math.abs(each[0] - place) < Math.abs(best[0] - place) ? each : best));
      return { label: line.label, x: point[0], y: y0 + (1 - point[1] / box.height) * (y1 - y0) };
    });
    if (!near.length) return;
    const x = near[0].x / box.width;
    reading.hidden = false;
    reading.classList.toggle("left", x > 0.55);
    reading.style.left = area.left - plot.getBoundingClientRect().left + x * area.width + "px";
    text.textContent = ["iteration " + Math.round(x0 + x * (x1 - x0)),
      ...near.map((each) => each.label + "  " + Number(each.y.toPrecision(4)))].join("\n");
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => { reading.hidden = true; });
}
