// The search view: a photo, an item, a region of one or several of them as one query, and the nearest items as a grid.
import { base64, base64Of, bytes, call, floats, galleryPath, item, picture, ApiError } from "./api.js";
import { codePanel } from "./code.js";
import { cropper, cut, isRegion, load, WHOLE } from "./crop.js";
import { announce, button, coded, count, h, notice, problem, toast } from "./dom.js";
import { explain } from "./explain.js";
import { conditions, filterForm, message, short } from "./filters.js";
import { grid } from "./grid.js";
import { markActions, showMarks } from "./marks.js";
import { keepPhoto, keptPhoto, read, write } from "./state.js";

const MOST = 32 * 2 ** 20; // bytes of a photo
const MOST_PARTS = 16; // pictures of a query
const K = 24, MOST_K = 500;
const TOUCH = matchMedia("(pointer: coarse)");
const pictures = new Map(); // what was looked up of parts of queries, by their names
let ui = null, shown = "", working = null;

/** Search with files that were dropped, pasted or chosen; `add` puts them beside what is searched with. */
export function take(files, { add = false } = {}) {
  const good = files.filter((file) => {
    const fault = !/^(image\/.*)?$/.test(file.type) ? "is no picture"
      : file.size === 0 ? "is empty" : file.size > MOST ? "is larger than 32 MiB" : null;
    if (fault) toast(`${file.name} ${fault}. Take a JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF file of at most 32 MiB.`);
    return !fault;
  });
  if (!good.length) return;
  if (good.length > MOST_PARTS) toast(`A query takes ${MOST_PARTS} pictures at most; the first ones are searched with.`);
  const before = add ? partsOf(read()) : [], room = Math.max(0, MOST_PARTS - before.length);
  const parts = [...before, ...good.slice(0, room).map((file) => ({ photo: keepPhoto(file), weight: 1 }))];
  write({ ...address(parts), view: "search" });
}

/** The parts of a query, {key or photo, weight, crop}, as the address has them: one by its name, several as JSON. */
function partsOf({ key, photo, crop, mix }) {
  if (mix) {
    try {
      return JSON.parse(mix).filter(({ key, photo, weight, crop = WHOLE }) => (key || photo) && Number.isFinite(weight) && weight && isRegion(crop)).slice(0, MOST_PARTS);
    } catch {
      return [];
    }
  }
  const region = (crop ?? "").split(",").map(Number), part = { weight: 1, ...(isRegion(region) && { crop: region }) };
  return key ? [{ key, ...part }] : photo ? [{ photo, ...part }] : [];
}

const kOf = ({ k }) => Math.min(MOST_K, Math.max(1, Math.trunc(Number(k)) || K));

function address(parts) {
  const none = { key: null, photo: null, crop: null, mix: null };
  if (parts.length !== 1 || parts[0].weight !== 1) return { ...none, mix: parts.length ? JSON.stringify(parts) : null };
  const [{ key, photo, crop }] = parts;
  return { ...none, key, photo, crop: crop?.map((each) => each.toFixed(3)).join(",") };
}

/** Look up what a part shows: {src, name, vector}; kept, since every step of the history asks for it. */
function lookUp(gallery, part) {
  const name = part.photo ? `photo ${part.photo}` : `${gallery.name}/${part.key}`;
  if (!pictures.has(name)) {
    const found = part.photo ? ofPhoto(part.photo) : item(gallery.name, part.key)
      .then((each) => ({ src: picture(each.thumbnail), name: part.key, ...each }));
    found.catch(() => pictures.delete(name));
    pictures.set(name, found);
  }
  return pictures.get(name);
}

async function ofPhoto(number) {
  const file = keptPhoto(number);
  if (!file) throw new ApiError(0, "", [{ reason: "PHOTO_GONE" }]);
  return { src: URL.createObjectURL(file), name: file.name || "pasted picture", file };
}

/** The bytes that are sent for a part, base64: the file as it is, or the region cut out. */
async function imageOf(gallery, part) {
  const { src, file, thumbnail } = await lookUp(gallery, part);
  if (!part.crop) return file ? base64Of(file) : thumbnail;
  const image = await load(src);
  if (!image) throw new ApiError(400, "This browser cannot read the picture, so no region of it can be cut out.");
  return base64Of(await cut(image, part.crop));
}

/** One query of the proto for the parts: the key or image of a single one, else the weighted mean of unit vectors. */
async function queryOf(gallery, parts, model, signal) {
  const [first] = parts, sent = (part) => Boolean(part.photo || part.crop);
  if (parts.length === 1 && first.weight > 0) return sent(first) ? { image: await imageOf(gallery, first) } : { key: first.key };
  const images = await Promise.all(parts.filter(sent).map((part) => imageOf(gallery, part)));
  const { results = [] } = images.length ? await call("POST", "/v1:embed", { images, model }, { signal }) : {};
  const sum = new Float64Array(gallery.dimension);
  for (const part of parts) {
    const { vector, error } = sent(part) ? results.shift() : await lookUp(gallery, part);
    if (error) throw new ApiError(400, error.message);
    floats(vector).forEach((value, index) => { sum[index] += part.weight * value; });
  }
  const norm = Math.hypot(...sum);
  if (norm < 1e-6) throw new ApiError(400, "The pictures cancel one another out. Take one away, or change a weight.");
  return { vector: base64(Float32Array.from(sum, (value) => value / norm)) };
}

function mount(root) {
  const chosen = (add) => ({ change: (event) => { take([...event.target.files], { add }); event.target.value = ""; } });
  const file = (id, add, props) => h("input", { type: "file", id, accept: "image/*,.heic,.avif", hidden: true, on: chosen(add), ...props });
  const open = (id) => () => document.getElementById(id).click();
  const check = (id, field, text) => h("label", { class: "check" },
    h("input", { type: "checkbox", id, on: { change: (event) => write({ [field]: event.target.checked ? "1" : null }) } }), text);
  ui = {
    told: h("p", { class: "soft" }),
    parts: h("ul", { class: "parts", role: "list", "aria-label": "Pictures of the query" }),
    crop: cropper({ onCrop: (crop) => write(address([{ ...partsOf(read())[0], crop: crop ?? undefined }])) }),
    filter: filterForm({ onChange: (filter) => write({ filter }) }),
    k: h("input", { id: "k-input", type: "number", min: 1, max: MOST_K, required: true, on: {
      change: (event) => (event.target.reportValidity() ? write({ k: event.target.value === String(K) ? null : event.target.value }) : null) } }),
    least: h("input", { id: "least-score", type: "range", min: 0, max: 1, step: 0.01, "aria-describedby": "least-told", on: {
      input: hide, change: (event) => write({ least: Number(event.target.value) ? event.target.value : null }) } }),
    leastTold: h("output", { id: "least-told", for: "least-score" }),
    group: check("group-input", "group", "One result of each label"),
    other: check("other-input", "other", "Another product (of other label)"),
    head: h("div", { class: "head" }),
    results: h("div", { id: "results" }),
    code: codePanel(),
  };
  const camera = TOUCH.matches ? button("Take a photo", open("camera-input")) : null;
  const fold = h("details", { class: "fold", open: matchMedia("(min-width: 60rem)").matches }, h("summary", {}, "Filter and options"),
    h("div", { class: "fields" }, h("label", {}, "Results", ui.k), h("label", {}, h("span", {}, "Least score: ", ui.leastTold), ui.least)),
    ui.group, ui.other, h("h2", {}, "Filter"), ui.filter.element);
  root.append(h("div", { class: "split" },
    h("section", { class: "controls", "aria-label": "Query and filter" },
      h("div", { id: "drop-zone" }, ui.told,
        h("div", { class: "buttons" }, button("Choose a picture", open("photo-input"), { class: "primary" }), camera,
          button("Add one", open("add-input"), { id: "add-button", title: "Search with several pictures as one query" })),
        file("photo-input", false, {}), file("add-input", true, { multiple: true }), file("camera-input", false, { capture: "environment" })),
      ui.parts, ui.crop.element, fold),
    h("section", { "aria-label": "Results" }, ui.head, ui.results, ui.code.element)));
}

function unmount() {
  working?.abort();
  pictures.clear(); // items may be changed in another view
  [ui, shown] = [null, ""];
}

function update(state, context) {
  const parts = partsOf(state);
  ui.k.value = kOf(state);
  ui.least.value = Number(state.least) || 0;
  ui.group.firstChild.checked = Boolean(state.group);
  ui.other.firstChild.checked = Boolean(state.other);
  ui.filter.update(state.gallery, state.filter);
  document.getElementById("add-button").hidden = parts.length === 0;
  ui.told.textContent = parts.some((each) => each.photo)
    ? "Your photo stays in this tab: a link to this page cannot hold it."
    : TOUCH.matches ? "Take a photo, or choose a picture." : "Drop or paste a picture anywhere, or choose one.";
  const asks = JSON.stringify([parts, ...["gallery", "filter", "k", "least", "group", "other"].map((name) => state[name])]);
  hide();
  if (asks === shown) return;
  shown = asks;
  working?.abort();
  working = new AbortController();
  const { signal } = working, again = () => { shown = ""; update(read(), context); };
  ui.results.setAttribute("aria-busy", "true");
  showParts(parts, context, signal);
  (parts.length ? search(parts, state, context, signal) : start(state, context, signal)).catch((error) => {
    if (signal.aborted) return;
    ui.head.replaceChildren();
    ui.code.update(null);
    ui.results.replaceChildren(error.reason === "PHOTO_GONE" ? gone() : refused(error, again));
  }).finally(() => signal.aborted || ui?.results.removeAttribute("aria-busy"));
}

const gone = () => notice("The photo is not here any more", [
  "A photo is kept in the tab it was put into, until that is closed or loaded anew. Drop it again to search with it."]);

const plain = ({ message }) => message.replace(/^queries\[\d+\]\.\w+: /, ""); // there is one query, and it has no number for people

const refused = (error, again) => (error.reason === "BAD_IMAGE"
  ? notice("This picture cannot be read", [plain(error), "Open it in a viewer of pictures, and save it as one of these."])
  : problem(Object.assign(error, { message: plain(error) }), again));

/** Which of the models embeds for a gallery: its own, or one of lower precision made from that. */
const modelOf = ({ gallery, models }) => models.find((each) => each.fingerprint === gallery.model_fingerprint)
  ?? models.find((each) => JSON.parse(each.spec_json).fp32_fingerprint === gallery.model_fingerprint);

async function start({ gallery }, context, signal) {
  ui.code.update(null);
  const { items = [] } = await call("POST", galleryPath(gallery, "/items:sample"), { size: K, with_thumbnails: true }, { signal });
  ui.head.replaceChildren(h("h2", {}, items.length ? "Search by picture" : "This gallery is empty"),
    h("p", { class: "soft" }, coded(items.length
      ? `Drop a photo, or start from one of these: ${K} of ${count(context.gallery.items)} items, drawn at random.`
      : "Fill it with `crossbatch index`, or by the client's `upsert`.")));
  ui.results.replaceChildren(cards(items, context));
  hide();
}

async function search(parts, state, context, signal) {
  const { gallery } = context;
  if (gallery.problem) throw new ApiError(412, gallery.problem.message);
  const model = modelOf(context)?.name ?? "", keys = parts.map((each) => each.key).filter(Boolean);
  const request = {
    queries: [await queryOf(gallery, parts, model, signal)], k: kOf(state), with_thumbnails: true, model,
    ...(keys.length && { exclude_keys: keys }), filter: message(conditions(state.filter)),
    ...(Number(state.least) && { minimum_score: Number(state.least) }),
    ...(state.group && { group_by_label: true }), ...(state.other && { exclude_same: "$label" }),
  };
  const reply = await call("POST", galleryPath(gallery.name, ":search"), request, { signal });
  const [{ hits: found = [], error }] = reply.results;
  if (error) throw new ApiError(400, error.message, error.details);
  if (signal.aborted) return;
  const unknown = h("p", { class: "soft", hidden: !reply.unknown_fields }, `No item has the field ${reply.unknown_fields?.join(", ")}.`);
  ui.head.replaceChildren(h("h2", { id: "found" }),
    h("span", { class: "soft" }, `of ${count(gallery.items)} in ${gallery.name}, by ${model || gallery.model_name}`), timings(reply.timings), unknown);
  ui.results.replaceChildren(found.length ? cards(found, context) : nothing(state));
  hide();
  await showCode(parts, state, request, gallery);
  announce(`${found.length} results.`);
}

async function showCode(parts, state, request, gallery) {
  const named = await Promise.all(parts.map(async (part) => ({ ...part, name: (await lookUp(gallery, part)).name })));
  const { with_thumbnails, ...rest } = request; // a shell is no place for pictures
  ui?.code.update({ gallery: gallery.name, parts: named, request: rest, filter: short(conditions(state.filter)) });
}

/** Explain a hit by the first picture of the query that is like what is looked for. */
async function why(hit, context) {
  const part = partsOf(read()).find((each) => each.weight > 0);
  if (!part) return toast("Nothing in the query is like what is looked for, so no match can be explained.");
  const { src, name } = await lookUp(context.gallery, part), image = await imageOf(context.gallery, part);
  return explain([{ title: `The query: ${name}`, src: part.crop ? `data:image/jpeg;base64,${image}` : src, image },
    { title: `${hit.label || "The result"}: ${hit.key}`, src: picture(hit.thumbnail), image: hit.thumbnail }], modelOf(context));
}

const nothing = (state) => notice("Nothing was found", [
  state.filter || state.least ? "No item passes the filter and the least score." : "The gallery has no other item.",
], state.filter || state.least ? button("Search without them", () => write({ filter: null, least: null }), { class: "primary" }) : null);

function cards(items, context) {
  const parts = partsOf(read()), part = (weight) => (hit) => write(address([...parts, { key: hit.key, weight }]));
  const [{ key, photo, crop } = {}] = parts, query = parts.length === 1 && !crop ? (key ?? keptPhoto(photo)?.name) : null; // what marks are of
  const list = grid(items, { onPick: (hit) => write(address([{ key: hit.key, weight: 1 }])), actions: parts.length ? [
    { name: "why", title: "Why it matches", text: "why", key: "e", run: (hit) => why(hit, context) },
    { name: "like", title: "Add to the query: like this", text: "+", key: "l", run: part(1) },
    { name: "unlike", title: "Add to the query: not like this", text: "−", key: "n", run: part(-1) },
    ...(query ? markActions(context.gallery.name, query) : []),
  ] : [] });
  if (query) showMarks(list, context.gallery.name, query);
  return list;
}

/** Hide what scores less than the slider says, while it is moved. */
function hide() {
  const least = Number(ui.least.value);
  ui.leastTold.textContent = least ? least.toFixed(2) : "any";
  const all = [...ui.results.querySelectorAll(".card[data-score]")];
  for (const each of all) each.hidden = least > 0 && Number(each.dataset.score) < least;
  const title = document.getElementById("found");
  if (title) title.textContent = `${all.filter((each) => !each.hidden).length} nearest`;
}

function timings(times = {}) {
  const parts = Object.entries(times).filter(([, value]) => Number(value) > 0)
    .map(([name, value]) => h("span", {}, `${name.replace("_us", "")} ${(value / 1000).toFixed(1)} ms`));
  return h("p", { id: "timings", title: "Time that each stage took on the server" }, parts);
}

async function showParts(parts, context, signal) {
  const found = await Promise.all(parts.map((part) => lookUp(context.gallery, part).catch(() => null)));
  const single = parts.length === 1 && parts[0].weight === 1, spec = modelOf(context);
  const images = await Promise.all(found.map((each) => (each?.src ? load(each.src) : null)));
  if (signal.aborted || !ui) return;
  ui.crop.show(single && spec ? images[0] : null, parts[0]?.crop, spec && JSON.parse(spec.spec_json));
  if (single) {
    const name = found[0]?.name ?? parts[0].key ?? "photo";
    return ui.parts.replaceChildren(h("li", { class: "part alone" }, h("span", {}, name),
      button("×", () => write(address([])), { id: "clear-query", title: "Search for something else", "aria-label": `Remove ${name}` })));
  }
  ui.parts.replaceChildren(...parts.map((part, at) => {
    const change = (weight) => write(address(parts.map((each, index) => (index === at ? { ...each, weight } : each)).filter((each) => each.weight)));
    const { src, name = part.key ?? "photo" } = found[at] ?? {}, sign = part.weight < 0 ? "−" : "+";
    return h("li", { class: "part", dataset: { sign } },
      h("div", { class: "picture", title: name }, images[at] ? h("img", { src, alt: name }) : h("span", { class: "bare" }, name)),
      h("div", {}, `${sign === "+" ? "like" : "not like"} ×${Math.abs(part.weight)}`),
      h("div", { class: "actions" },
        button("+", () => change(Math.min(5, part.weight + (part.weight === -1 ? 2 : 1))), { "aria-label": `More of ${name}` }),
        button("−", () => change(Math.max(-5, part.weight - (part.weight === 1 ? 2 : 1))), { "aria-label": `Less of ${name}` }),
        button("×", () => change(0), { "aria-label": `Remove ${name}` })));
  }));
}

export default {
  name: "search", title: "Search", mount, update, unmount,
  keys: [["r", "mark the result as right"], ["w", "mark it as wrong"], ["u", "take the mark away"], ["e", "why it matches"],
    ["l", "add the picture to the query: like this"], ["n", "add it: not like this"]],
};
