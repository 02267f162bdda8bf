// The frame: boots the page, shows one view at a time, and has what holds in all of them. A view is
// {name, title, keys, mount(root), update(state, {gallery, galleries, models}), unmount()}, and may have take(files).
import { call } from "./api.js";
import { announce, button, h, notice, problem } from "./dom.js";
import { href, keep, kept, read, subscribe, write } from "./state.js";
import search, { take } from "./search.js";

const VIEWS = ["search", "browse", "map", "compare", "marks"];
const KEPT = ["gallery", "key", "photo", "filter"]; // what a view takes over from the one before
const OF_GALLERY = ["key", "filter", "mix", "crop", "show", "prefix", "page", "at", "colour"]; // what means nothing in another one
const SIZE = "crossbatch-size";
const main = document.getElementById("main");
const chooser = document.getElementById("gallery-select");
const size = document.getElementById("size-input");
const keysDialog = document.getElementById("keys-dialog");
let current = null, context = null, turn = 0;

/** Ask which galleries and models there are. */
async function look() {
  const [{ galleries = [], next_page_token }, { models = [] }] = await Promise.all([
    call("GET", "/v1/galleries?page_size=1000"), call("GET", "/v1/models")]);
  if (next_page_token) announce("Only the first 1,000 galleries are listed.");
  return { galleries, models };
}

async function show(state, { anew = false } = {}) {
  const mine = ++turn;
  if (!VIEWS.includes(state.view)) return write({ view: "search" }, { replace: true });
  try {
    if (anew || !context || current?.name !== state.view) context = await look();
    const view = state.view === "search" ? search : (await import(`./${state.view}.js`)).default;
    if (mine !== turn) return;
    const { galleries } = context;
    const gallery = galleries.find((each) => each.name === state.gallery);
    if (!state.gallery && galleries.length) {
      return write({ gallery: (galleries.find((each) => !each.problem) ?? galleries[0]).name }, { replace: true });
    }
    frame(state, view.title, galleries);
    if (!gallery) return leave(galleries.length ? unknown(state.gallery, galleries) : empty());
    if (current !== view) {
      leave();
      current = view;
      view.mount(main);
    }
    view.update(state, { ...context, gallery });
  } catch (error) {
    if (mine === turn) leave(problem(error, () => show(read(), { anew: true })));
  }
}

/** End the view that is shown, for `instead` or nothing. */
function leave(...instead) {
  current?.unmount();
  current = null;
  main.replaceChildren(...instead);
}

function frame(state, title, galleries) {
  document.getElementById("title").textContent = title;
  document.title = [title, state.gallery, "crossbatch"].filter(Boolean).join(" · ");
  const kept = new URLSearchParams(KEPT.filter((name) => state[name]).map((name) => [name, state[name]])).toString();
  for (const link of document.querySelectorAll("nav [data-view]")) {
    link.href = `#/${link.dataset.view}${kept && `?${kept}`}`;
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  chooser.replaceChildren(...galleries.map(({ name }) => h("option", { value: name }, name)));
  chooser.value = state.gallery ?? "";
  chooser.disabled = galleries.length === 0;
}

function unknown(name, galleries) {
  return notice(`There is no gallery “${name}”`, ["It may have been renamed or deleted. There are:"],
    h("p", { class: "chips" }, galleries.slice(0, 50).map((each) =>
      h("a", { class: "chip", href: href({ gallery: each.name, key: null }) }, each.name))));
}

function empty() {
  return notice("There is no gallery yet", [
    "A gallery holds the pictures that are searched. Make one of a folder of images, beside the server's other galleries:",
    h("code", { class: "block" }, "crossbatch index --model MODEL.onnx --data FOLDER --thumbnails --galleries GALLERIES NAME"),
    "The server finds it by itself."], button("Look again", () => show(read(), { anew: true }), { class: "primary" }));
}

function resize(pixels) {
  document.documentElement.style.setProperty("--card", `${pixels}px`);
  size.value = pixels;
  keep(SIZE, pixels);
}

function showKeys() {
  const common = [["1 – 5", "search, browse, map, compare, marks"], ["o", "choose a photo; it can be dropped or pasted anywhere, too"],
    ["/", "filter"], ["+ −", "size of the pictures"],
    ["arrows", "from picture to picture"], ["Enter", "more like this"], ["?", "this list"], ["Esc", "close"]];
  const rows = [...common, ...(current?.keys ?? [])];
  document.getElementById("keys-list").replaceChildren(h("dl", { class: "keys" },
    rows.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])));
  keysDialog.showModal();
}

function focusFilter() {
  const field = document.getElementById("filter-value");
  for (let each = field?.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
  field?.focus();
}

const KEYS = {
  "?": showKeys, "/": focusFilter,
  "+": () => resize(Math.min(320, Number(size.value) + 24)), "-": () => resize(Math.max(88, size.value - 24)),
  o: () => document.getElementById("photo-input")?.click(),
  ArrowRight: () => document.querySelector(".card:not([hidden]) .picture")?.focus(),
  ...Object.fromEntries(VIEWS.map((name, index) => [index + 1, () => document.querySelector(`nav [data-view=${name}]`).click()])),
};

addEventListener("keydown", (event) => {
  const busy = event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]");
  if (busy || event.target.closest("input, select, textarea, [role=application]") || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

// A picture is dropped or pasted anywhere.
const hint = document.getElementById("drop-hint");
const carries = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!carries(event)) return;
  event.preventDefault();
  hint.hidden = false;
});
addEventListener("dragleave", (event) => (hint.hidden ||= event.relatedTarget === null));
addEventListener("drop", (event) => {
  if (!carries(event)) return;
  event.preventDefault();
  hint.hidden = true;
  (current?.take ?? take)([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => {
  if (event.clipboardData.files.length === 0) return;
  event.preventDefault();
  const pasted = `pasted ${new Date().toISOString().replaceAll(":", "-")}.png`; // else all are image.png, and their marks of one
  const named = (file) => (file.name === "image.png" ? new File([file], pasted, { type: file.type }) : file);
  (current?.take ?? take)([...event.clipboardData.files].map(named));
});

chooser.addEventListener("change", () => write({ ...Object.fromEntries(OF_GALLERY.map((name) => [name, null])), gallery: chooser.value }));
size.addEventListener("input", () => resize(Number(size.value)));
document.getElementById("keys-button").addEventListener("click", showKeys);
document.getElementById("skip").addEventListener("click", () => main.focus());
resize(Number(kept(SIZE)) || (matchMedia("(max-width: 30rem)").matches ? 152 : 168));
subscribe(show);
