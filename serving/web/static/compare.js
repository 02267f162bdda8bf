// Compare: the same query in two galleries side by side, and the queries on which they differ most.
import { base64Of, call, galleryPath, item } from "./api.js";
import { download } from "./csv.js";
import { announce, button, count, digits, h, notice, problem, table } from "./dom.js";
import { fill, stop } from "./fill.js";
import { grid } from "./grid.js";
import { href, keepPhoto, keptPhoto, write } from "./state.js";

const K = 12, MOST_K = 100, RANDOM = 50, PHOTOS = 4, MOST = 1000; // results; random queries; photos in one call; queries of a list
const MEANING = [
  "How many of the first k results both have, divided by k.",
  "Agreement of the two orders, 0 to 1, where the first ranks weigh most (Webber, Moffat and Zobel, 2010): " +
    "A(k) p^k + (1 − p) / p · Σ A(d) p^d over d = 1 to k, where A(d) is the part of the first d results that is shared, and p = 0.9.",
];
let root, one, many, listed = "", faced = "";

/** The part of two lists that both have: |a ∩ b| / k, k the length of the longer one; 1 for two empty ones. */
export const overlap = (a, b) => (a.length + b.length ? a.filter((key) => b.includes(key)).length / Math.max(a.length, b.length) : 1);

/** Rank-biased overlap of two lists, extrapolated beyond their end: equation 30 of Webber, Moffat and Zobel (2010), where
 * a shorter list, of a gallery that has no more, shares nothing beyond its own end. */
export function rankBiasedOverlap(a, b, p = 0.9) {
  let sum = 0, agreement = 1;
  const k = Math.max(a.length, b.length);
  for (let d = 1; d <= k; d++) {
    agreement = a.slice(0, d).filter((key) => b.slice(0, d).includes(key)).length / d;
    sum += agreement * p ** d;
  }
  return agreement * p ** k + ((1 - p) / p) * sum;
}

/** Search for queries {key} or {photo}: of each {hits}, the query itself left out, or {hits: [], error}. */
async function search(gallery, queries, k, signal, with_thumbnails = false) {
  const found = [], step = queries[0]?.photo ? PHOTOS : 256;
  for (let at = 0; at < queries.length; at += step) {
    const part = queries.slice(at, at + step),
      images = part.map(async ({ key, photo }) => (photo ? { image: await base64Of(keptPhoto(photo)) } : { key }));
    const request = { queries: await Promise.all(images), k: k + 1, with_thumbnails };
    const { results } = await call("POST", galleryPath(gallery, ":search"), request, { signal }).catch((error) => {
      if (queries.length === 1 || ![400, 404].includes(error.status)) throw error;
      return { results: part.map(() => ({ error })) }; // all of them failed
    });
    found.push(...results.map(({ hits = [], error }, index) => ({ error, hits: hits.filter(({ key }) => key !== part[index].key).slice(0, k) })));
  }
  return found;
}

const keysOf = ({ hits }) => hits.map(({ key }) => key);

function side(id, gallery, mine, theirs) {
  const cards = grid(mine.hits, { onPick: ({ key }) => write({ key, photo: null }), pick: "Compare by this" }), ranks = keysOf(theirs);
  [...cards.children].forEach((card, rank) => {
    const twin = ranks.indexOf(card.item.key);
    card.classList.add(twin < 0 ? "alone" : "both");
    if (twin >= 0) card.style.setProperty("--twin", `var(--s${(id === "compare-left" ? rank : twin) % 8})`);
    card.prepend(h("span", { class: "twin" }, twin < 0 ? `${rank + 1} · only here` : `${rank + 1} · there ${twin + 1}`));
  });
  cards.addEventListener("pointerover", ({ target }) => {
    const key = target.closest(".card")?.dataset.key;
    for (const card of one.querySelectorAll(".sides .card")) card.classList.toggle("lit", card.dataset.key === key);
  });
  return h("section", { id, "aria-label": gallery }, h("h2", {}, gallery),
    mine.failed ? problem(mine.failed) : mine.hits.length ? cards : notice("Nothing found", [mine.error?.message ?? "The gallery has no other item."]));
}

async function pair({ gallery, other, key, photo }, k, signal) {
  const file = keptPhoto(photo);
  if (photo && !file) return [notice("The photo is not here any more", ["A photo is kept until the page is closed. Choose it again."])];
  const sides = await Promise.all([gallery, other].map(async (each) => {
    try {
      return (await search(each, [{ key, photo }], k, signal, true))[0];
    } catch (failed) {
      if (failed.name === "AbortError") throw failed;
      return { hits: [], failed };
    }
  }));
  const query = photo ? { key: file.name } : await item(gallery, key, { signal }).catch(() => ({ key })), [left, right] = sides.map(keysOf);
  const told = `${count(left.filter((each) => right.includes(each)).length)} results shared; ` +
    `overlap@${k} ${digits(overlap(left, right))}, rank-biased overlap ${digits(rankBiasedOverlap(left, right))}`;
  announce(told);
  return [h("div", { class: "compared" }, photo ? h("b", {}, file.name) : grid([query], { onPick: () => write({ view: "search", other: null, list: null }) }),
    sides.some(({ failed }) => failed) ? null : h("p", { title: MEANING.join("\n") }, told)),
  h("div", { class: "sides" }, side("compare-left", gallery, ...sides), side("compare-right", other, ...sides.toReversed()))];
}

/** The queries of the list, `["random", number, seed]`, `["key", ...]` or `["photo", ...]`, by how much the two differ. */
async function measure({ gallery, other, list }, k, signal) {
  const [way, ...rest] = JSON.parse(list), [size, seed] = rest;
  const drawn = way === "random" ? (await call("POST", galleryPath(gallery, "/items:sample"), { size, seed }, { signal })).items ?? [] : null;
  const queries = (drawn?.map(({ key }) => ({ key })) ?? rest.map((each) => ({ [way]: each }))).filter(({ photo }) => !photo || keptPhoto(photo));
  const [lefts, rights] = await Promise.all([gallery, other].map((each) => search(each, queries, k, signal)));
  const rows = queries.map((query, at) => {
    const both = [lefts[at], rights[at]], lists = both.map(keysOf), error = both.map((each) => each.error?.message).find(Boolean);
    return { ...query, name: query.key ?? keptPhoto(query.photo).name, error, figures: error ? [] : [overlap(...lists), rankBiasedOverlap(...lists)] };
  }).sort((a, b) => (a.figures[1] ?? 2) - (b.figures[1] ?? 2));
  const names = [`overlap@${k}`, "rank-biased overlap"];
  const line = ({ name, key = null, photo = null, error, figures }) => h("tr", {},
    h("th", { scope: "row" }, h("a", { href: href({ key, photo }), on: { click: () => scrollTo(0, 0) } }, name)),
    error ? h("td", { colspan: 2 }, error) : figures.map((each) => h("td", {}, digits(each))));
  const cells = rows.map(({ name, figures: [shared = "", biased = ""] }) => [name, shared, biased]);
  return [table("compare-table", `${rows.length} queries; those on which ${gallery} and ${other} differ most come first`,
    ["query", ...names.map((name, at) => h("abbr", { title: MEANING[at] }, name))], rows.map(line)),
  button("Export as CSV", () => download(`${gallery}-${other}.csv`, [["query", ...names], ...cells]), { id: "export-comparison" })];
}

/** Make queries of files: of photos, and of the lines of a text, which are keys. */
async function take(files) {
  const isText = ({ type }) => type.startsWith("text/"), photos = files.filter((file) => !isText(file)).slice(0, MOST).map(keepPhoto);
  const keys = (await Promise.all(files.filter(isText).map((file) => file.text()))).join("\n").split(/\r?\n/).filter(Boolean).slice(0, MOST);
  if (photos.length === 1 && !keys.length) write({ photo: photos[0], key: null });
  else if (photos.length + keys.length) write({ list: JSON.stringify(keys.length ? ["key", ...keys] : ["photo", ...photos]) });
}

function controls({ gallery, other }, k, others) {
  const chooser = h("select", { id: "other-select", on: { change: () => write({ other: chooser.value }) } },
    others.map((name) => h("option", { selected: name === other }, name)));
  const depth = h("input", { type: "number", min: 1, max: MOST_K, value: k, on: { change: () => write({ k: depth.value }) } });
  const query = h("input", { id: "compare-key", autocomplete: "off", placeholder: "key of an item" });
  const files = h("input", { type: "file", multiple: true, accept: "image/*,.txt,text/plain", class: "visually-hidden",
    on: { change: () => take([...files.files]) } });
  const submit = (event) => { event.preventDefault(); write({ key: query.value, photo: null }); };
  return h("form", { class: "bar", on: { submit } }, h("label", {}, `${gallery} beside`, chooser),
    h("label", {}, "Results", depth), h("label", {}, "Query", query), h("button", { class: "primary" }, "Compare"),
    h("label", { class: "button" }, "Photos, or a text of keys", files),
    button(`${RANDOM} random queries`, () => write({ list: JSON.stringify(["random", RANDOM, 1 + Math.floor(Math.random() * 2 ** 31)]) }), { id: "compare-random" }));
}

export default {
  name: "compare", title: "Compare", take,
  mount(place) {
    [root, one, many, listed, faced] = [place, h("div"), h("div"), "", ""];
  },
  update(state, { galleries }) {
    const others = galleries.filter(({ name, problem: fault }) => name !== state.gallery && !fault).map(({ name }) => name);
    if (!others.length) return root.replaceChildren(notice("There is nothing to compare with", [
      "Index the same pictures with another model as a second gallery. Items are the same where their keys are.",
      h("code", { class: "block" }, "crossbatch index --model OTHER.onnx --data FOLDER --thumbnails --galleries GALLERIES OTHER")]));
    if (!others.includes(state.other)) return write({ other: others[0] }, { replace: true });
    const k = Math.max(1, Math.min(MOST_K, Math.round(state.k) || K)), asked = JSON.stringify([state.gallery, state.other, k, state.list]);
    const face = JSON.stringify([state.gallery, state.other, k, others]);
    if (face !== faced) root.replaceChildren(controls(state, k, others), one, many);
    faced = face;
    document.getElementById("compare-key").value = state.key ?? "";
    if (state.key || state.photo) fill(one, (signal) => pair(state, k, signal));
    else one.replaceChildren(notice("Choose a query", [
      `Type the key of an item, choose or drop a photo, or let ${RANDOM} random queries show where the two differ.`]));
    if (asked !== listed && state.list) fill(many, (signal) => measure(state, k, signal));
    else if (!state.list) many.replaceChildren();
    listed = asked;
  },
  unmount: () => [one, many].forEach(stop),
};
