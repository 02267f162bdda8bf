// Why a result matches: which prototypes the query and the result share, and where they are in both.
import { bytes, call, floats } from "./api.js";
import { drawSeen, load } from "./crop.js";
import { button, h, notice, openDialog, problem } from "./dom.js";

const MOST = 16; // prototypes that are listed
const SIDE = 448; // pixels of a side of the maps
const COLOURS = 128; // of prototypes: those of palette.css, as in the reports

/** The prototypes that two histograms share, the largest share of their intersection Σ min(z, z') first: [number, share]. */
function sharedOf(one, other) {
  const least = [...one].map((value, index) => Math.min(value, other[index]));
  const total = least.reduce((sum, value) => sum + value, 0);
  const shares = least.map((value, number) => [number, total ? value / total : 0]).filter(([, share]) => share > 0);
  return { total, shares: shares.sort(([a, x], [b, y]) => y - x || a - b) };
}

/** Open the explanation of two pictures {title, src, image}, `image` base64 or null, by a model of ListModels. */
export async function explain(pictures, model) {
  const work = new AbortController(), body = h("div", {}, h("p", { class: "soft", role: "status" }, "The model looks at both pictures…"));
  openDialog({ id: "explain-dialog", class: "wide", closedby: "any", "aria-labelledby": "explain-title", on: { close: () => work.abort() } },
    h("form", { method: "dialog" }, h("div", { class: "head" },
      h("h2", { id: "explain-title" }, "Why it matches"), h("button", { class: "close", "aria-label": "Close", autofocus: true }, "×"))), body);
  const missing = pictures.find((each) => !each.image);
  if (!model?.prototypes) {
    return body.replaceChildren(notice("This model has no learnt prototypes", [
      `${model?.name ?? "The model"} was exported without them, so it gives scores and no reasons.`,
      "Train one with `reconstruction_weight` or `xml_weight` above 0, export it, and index the gallery with it."]));
  }
  if (missing) {
    return body.replaceChildren(notice("There is no picture to explain", [
      `The gallery keeps no thumbnail of “${missing.title}”. Index it anew with \`crossbatch index --thumbnails\`: that is decided when a gallery is made.`]));
  }
  const ask = async () => {
    try {
      const sent = { images: pictures.map((each) => each.image), model: model.name };
      const [reply, ...images] = await Promise.all([call("POST", "/v1:explain", sent, { signal: work.signal }),
        ...pictures.map((each) => load(each.src))]);
      const fault = reply.results.find((each) => each.error)?.error;
      if (fault) throw new Error(fault.message);
      body.replaceChildren(maps(pictures, images, reply.results, JSON.parse(model.spec_json)));
    } catch (error) {
      if (!work.signal.aborted) body.replaceChildren(problem(error, ask));
    }
  };
  return ask();
}

function maps(pictures, images, results, spec) {
  const style = getComputedStyle(document.documentElement);
  const palette = Array.from({ length: COLOURS }, (_, number) => style.getPropertyValue(`--p${number}`));
  const [one, other] = results.map((each) => floats(each.histogram)), { total, shares } = sharedOf(one, other);
  const listed = shares.slice(0, MOST).filter(([, share]) => share >= 0.005);
  let pinned = null;
  const light = (number) => {
    const shown = number ?? pinned;
    for (const map of drawn) map.draw(shown);
    for (const row of rows) row.classList.toggle("lit", Number(row.dataset.prototype) === shown);
  };
  const drawn = results.map((result, at) => mapOf(pictures[at], images[at], result, spec, palette, light));
  const rows = listed.map(([number, share]) => {
    const percent = `${(share * 100).toFixed(1)} %`, swatch = h("i"), bar = h("span", { class: "amount" });
    const told = `Prototype ${number}: ${percent} of what they share; ` +
      `${(one[number] * 100).toFixed(1)} % of the query, ${(other[number] * 100).toFixed(1)} % of the result`;
    swatch.style.background = bar.style.background = palette[number % COLOURS];
    bar.style.width = `${(share / listed[0][1]) * 100}%`;
    const row = button([swatch, `#${number}`, bar, h("b", {}, percent)], () => {
      pinned = pinned === number ? null : number;
      for (const each of rows) each.setAttribute("aria-pressed", Number(each.dataset.prototype) === pinned);
      light(null);
    }, { dataset: { prototype: number }, "aria-pressed": "false", "aria-label": told, title: told, on: {
      pointerenter: () => light(number), pointerleave: () => light(null), focus: () => light(number), blur: () => light(null) } });
    return row;
  });
  light(null);
  return h("div", { class: "explained" },
    h("div", { class: "pair" }, drawn.map((each) => each.element)),
    h("div", {}, h("p", {}, "Their histograms overlap by ", h("b", {}, `${(total * 100).toFixed(0)} %`), ", of which each prototype is a part. Point at or press one to see where it is."),
      h("ol", { class: "shared" }, rows.map((row) => h("li", {}, row))),
      shares.length > listed.length ? h("p", { class: "soft" }, `and ${shares.length - listed.length} more with little of it`) : null));
}

/** A picture under the colours of its dominant prototypes: {element, draw(number)}, `number` the one to bring out or null. */
function mapOf({ title }, image, { assignments, height, width }, spec, palette, light) {
  const found = bytes(assignments), edge = (index, cells) => Math.round((index * SIDE) / cells);
  const canvas = h("canvas", { width: SIDE, height: SIDE, role: "img", "aria-label": `${title}: its prototypes in colours` });
  const under = h("canvas");
  if (image) drawSeen(under, image, null, spec);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), at = (place, extent, cells) => Math.min(cells - 1, Math.max(0, Math.floor((place / extent) * cells)));
    light(found[at(event.clientY - box.top, box.height, height) * width + at(event.clientX - box.left, box.width, width)]);
  });
  canvas.addEventListener("pointerleave", () => light(null));
  return {
    element: h("figure", {}, canvas, h("figcaption", {}, title)),
    draw(number) {
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, SIDE, SIDE);
      if (image) context.drawImage(under, 0, 0, SIDE, SIDE);
      found.forEach((each, index) => {
        context.globalAlpha = number === null ? 0.55 : each === number ? 0 : 0.75;
        context.fillStyle = number === null ? palette[each % COLOURS] : "#000";
        const column = index % width, row = (index - column) / width, left = edge(column, width), top = edge(row, height);
        context.fillRect(left, top, edge(column + 1, width) - left, edge(row + 1, height) - top);
      });
      context.globalAlpha = 1;
    },
  };
}
