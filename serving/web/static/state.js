// What is looked at: all of it in the address, #/VIEW?gallery=..&key=.., so that links and the back button work.
// Photos alone cannot be in an address: they are kept here until the page is closed, and the address has a number.

const photos = new Map();
let shown = null, watcher = null;

/** Read the address: {view, ...strings}. */
export function read() {
  const [, view, query] = /^#\/([a-z]*)\??(.*)$/.exec(location.hash) ?? [null, "", ""];
  return { ...Object.fromEntries(new URLSearchParams(query)), view: view || "search" };
}

/** The address of what is looked at with some of it changed; null takes a field away. */
export function href(patch) {
  const { view, ...fields } = { ...read(), ...patch };
  const kept = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${view}${query && `?${query}`}`;
}

/** Change some fields, as a new step of the history or in place of this one; nothing happens where all is the same. */
export function write(patch, { replace = false } = {}) {
  const address = href(patch);
  if (address === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", address);
  notify();
}

/** Call `show` with what is looked at, now and whenever that changes. */
export function subscribe(show) {
  watcher = show;
  notify();
}

function notify() {
  if (shown === location.hash) return;
  shown = location.hash;
  watcher(read());
}

addEventListener("popstate", notify);
addEventListener("hashchange", notify);

/** Read what this browser keeps by a name; null where it keeps nothing, or may not. */
export function kept(name, area = "localStorage") {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

/** Have this browser keep a text by a name; false where it does not, for want of room or of leave. */
export function keep(name, text, area = "localStorage") {
  try {
    window[area].setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

/** Keep a photo; gives the number by which the field `photo` names it. */
export function keepPhoto(blob) {
  photos.set(String(photos.size + 1), blob);
  return String(photos.size);
}

/** A kept photo; undefined where the address came from elsewhere, or the page was loaded anew. */
export const keptPhoto = (number) => photos.get(number);
