// Why a result matches: which prototypes the query and the result share, and where they are in both.
import { bytes, call, floats } from "./api.js";
import { drawSeen, load } from "./crop.js";
import { button, h, notice, problem } from "./dom.js";

/** Of prototype i the colour i % 128: the palette of the reports, made for all kinds of colour vision. */
export const PROTOTYPES = `
  0069d2 f0e169 c30f00 5ac3f0 b4a500 870f69 966987 2dffe1 ff87a5 8787ff 3c3ca5 c3694b d2c31e 874b5a 5a00ff 8778c3 96e1a5 3cb478
  960000 695aa5 a596d2 a55a5a 4be1e1 6900d2 ff3cff a52d87 78c369 5a9678 a53cff 692d87 ff1e0f d278a5 a5d278 783c3c b42dc3 69870f
  b4f0a5 c3a5d2 b469a5 695a2d 3cff00 ff96ff c369e1 006987 1ec396 f0c3ff 9687c3 1e964b 5a4ba5 f0b4c3 960f5a ff5a69 0096e1 b4e187
  3c4be1 78693c 69a55a 96f0c3 d2d24b 7869a5 b4001e b4962d 87d296 7869e1 b42d69 d26987 c3b400 4ba5ff 2d5a87 d25a1e e1a55a 78ff87
  a50078 ff5ab4 d2003c 5a00c3 c3c35a 78d2c3 d22d78 9669d2 e1874b f0d269 e12d69 782dc3 f09687 a5a5e1 c36996 695ac3 783c78 5af0e1
  3c96b4 3c1ee1 872d69 b4b4ff a55ab4 ff7896 780f96 2d5a1e 876996 f0a5b4 4b69f0 a5004b 694b96 1ed2e1 7887d2 964b4b 693c96 c3783c
  ff0fc3 a5000f 780fb4 3c7878 e15af0 d2a5c3 873cb4 879669 a5e100 d287f0 785a96 ffc3b4 5aa596 00692d a53cd2 f078ff 87e1d2 c31e78
  782dff d29678`.trim().split(/\s+/).map((each) => `#${each}`);
const MOST = 16; // prototypes that are listed
const SIDE = 448; // pixels of a side of the maps

/** The prototypes that two histograms share, the largest share of their intersection Σ min(z, z') first: [number, share]. */
export function sharedOf(one, other) {
  const least = [...one].map((value, index) => Math.min(value, other[index]));
  const total = least.reduce((sum, value) => sum + value, 0);
  const shares = least.map((value, number) => [number, total ? value / total : 0]).filter(([, share]) => share > 0);
  return { total, shares: shares.sort(([a, x], [b, y]) => y - x || a - b) };
}

/** Open the explanation of two pictures {title, src, image}, `image` base64 or null, by a model of ListModels. */
export async function explain(pictures, model) {
  const work = new AbortController(), body = h("div", {}, h("p", { class: "soft", role: "status" }, "The model looks at both pictures…"));
  const dialog = h("dialog", { id: "explain-dialog", class: "wide", closedby: "any", "aria-labelledby": "explain-title" },
    h("form", { method: "dialog" }, h("div", { class: "head" }, h("h2", { id: "explain-title" }, "Why it matches"), h("button", { class: "close", "aria-label": "Close", autofocus: true }, "×"))), body);
  dialog.addEventListener("close", () => { work.abort(); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
  const missing = pictures.find((each) => !each.image);
  if (!model?.prototypes) {
    return body.replaceChildren(notice("This model has no learnt prototypes", [
      `${model?.name ?? "The model"} was exported without them, so it gives scores and no reasons.`,
      "Train one with `reconstruction_weight` or `xml_weight` above 0, export it, and index the gallery with it."]));
  }
  if (missing) {
    return body.replaceChildren(notice("There is no picture to explain", [
      `The gallery keeps no thumbnail of ${missing.title}. Index it anew with \`crossbatch index --thumbnails\`: that is decided when a gallery is made.`]));
  }
  const ask = async () => {
    try {
      const sent = { images: pictures.map((each) => each.image), model: model.name };
      const [reply, ...images] = await Promise.all([call("POST", "/v1:explain", sent, { signal: work.signal }), ...pictures.map((each) => load(each.src))]);
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
  const [one, other] = results.map((each) => floats(each.histogram)), { total, shares } = sharedOf(one, other);
  const listed = shares.slice(0, MOST).filter(([, share]) => share >= 0.005);
  let pinned = null;
  const light = (number) => {
    const shown = number ?? pinned;
    for (const map of drawn) map.draw(shown);
    for (const row of rows) row.classList.toggle("lit", Number(row.dataset.prototype) === shown);
  };
  const drawn = results.map((result, at) => mapOf(pictures[at], images[at], result, spec, light));
  const rows = listed.map(([number, share]) => {
    const percent = `${(share * 100).toFixed(1)} %`, swatch = h("i"), bar = h("span", { class: "amount" });
    const told = `Prototype ${number}: ${percent} of what they share; ${(one[number] * 100).toFixed(1)} % of the query, ${(other[number] * 100).toFixed(1)} % of the result`;
    swatch.style.background = bar.style.background = PROTOTYPES[number % PROTOTYPES.length];
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
    h("div", {}, h("p", {}, "They share ", h("b", {}, `${(total * 100).toFixed(0)} %`), " of their prototypes. Point at one to see where it is."),
      h("ol", { class: "shared" }, rows.map((row) => h("li", {}, row))),
      shares.length > listed.length ? h("p", { class: "soft" }, `and ${shares.length - listed.length} more with little of it`) : null));
}

/** A picture under the colours of its dominant prototypes: {element, draw(number)}, `number` the one to bring out or null. */
function mapOf({ title }, image, { assignments, height, width }, spec, light) {
  const found = bytes(assignments), edge = (index, cells) => Math.round((index * SIDE) / cells), canvas = h("canvas", { width: SIDE, height: SIDE, role: "img", "aria-label": `${title}: its prototypes in colours` });
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
        context.fillStyle = number === null ? PROTOTYPES[each % PROTOTYPES.length] : "#000";
        const column = index % width, row = (index - column) / width, left = edge(column, width), top = edge(row, height);
        context.fillRect(left, top, edge(column + 1, width) - left, edge(row + 1, height) - top);
      });
      context.globalAlpha = 1;
    },
  };
}
