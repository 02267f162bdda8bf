// The server's calls as JSON over HTTP: the paths are those of the proto files, and so are the fields.
import { button, h, openDialog } from "./dom.js";
import { keep, kept } from "./state.js";

const KEY = "crossbatch-api-key";
let apiKey = kept(KEY, "sessionStorage");
const PATIENCE = 2; // times that a call which found no room is made again, after the time the server asks for

/** What the server answered: `status` of HTTP, 0 where no answer came; `reason` as in google.rpc.ErrorInfo. */
export class ApiError extends Error {
  constructor(status, message, details = []) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.reason = details.find((each) => each.reason)?.reason ?? "";
    const delay = details.map((each) => each.retryDelay ?? each.retry_delay).find(Boolean);
    this.delay = Math.min(10, Number.parseFloat(delay ?? "1")) * 1000; // ms
  }
}

/** Make a call and give its reply. The newest key is sent with it, and asked for where the server wants one. */
export async function call(method, path, body, { signal } = {}) {
  for (let tried = 0; ; tried++) {
    const key = apiKey;
    const headers = { ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
    let reply, told;
    try {
      reply = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
      told = await reply.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (!reply || reply.ok) throw new ApiError(0, "No answer came.");
    }
    if (reply.ok) return told;
    const error = new ApiError(reply.status, told?.message ?? `The server answered with status ${reply.status}.`, told?.details);
    if (error.status === 401 && (await askForKey(key))) continue;
    if (error.status !== 429 || tried >= PATIENCE) throw error;
    await new Promise((resolve) => setTimeout(resolve, error.delay));
    signal?.throwIfAborted();
  }
}

/** Whether calls are made with a key. */
export const hasKey = () => apiKey !== null;

let asking = null; // the one dialog that all calls wait for

function askForKey(refused) {
  if (apiKey !== refused) return true; // another call has asked meanwhile
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", name: "key", autocomplete: "off", required: true, autofocus: true });
    const dialog = openDialog({ id: "key-dialog", "aria-labelledby": "key-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "key-title" }, "API key"),
        h("p", {}, refused ? "The key is not valid here. Try another one." : "This server answers those who have a key."),
        h("label", {}, "Key", field),
        h("p", { class: "soft" }, "It is kept until this tab is closed, and sent to this server only."),
        h("div", { class: "buttons" },
          button("Cancel", () => dialog.close("")), h("button", { class: "primary", value: "use" }, "Use this key"))));
    dialog.addEventListener("close", () => {
      const use = dialog.returnValue === "use" && field.value.trim() !== "";
      if (use) keep(KEY, (apiKey = field.value.trim()), "sessionStorage");
      asking = null;
      resolve(use);
    });
  });
  return asking;
}

/** The path of a gallery, and of what is below it: galleryPath("shoes", "/items"), galleryPath("shoes", ":search"). */
export const galleryPath = (name, rest = "") => `/v1/galleries/${encodeURIComponent(name)}${rest}`;

/** Fetch an item with its vector and thumbnail. */
export async function item(gallery, key, options) {
  const path = encodeURIComponent(key); // slashes, too: a browser takes `..` between them for a step back
  const reply = await call("GET", galleryPath(gallery, `/items/${path}?with_thumbnail=true`), null, options);
  return { ...reply.item, thumbnail: reply.thumbnail ?? reply.item.thumbnail };
}

/** The fields of a gallery's items, the label among them: [{name, kinds, items, least, most}]. */
export const fieldsOf = async (gallery) => (await call("GET", galleryPath(gallery, "/fields"))).fields ?? [];

/** The most frequent values of a field, [[value, items], ...], and how many there are in all; `prefix` is of strings. */
export async function valuesOf(gallery, field, page_size, prefix = "") {
  const reply = await call("POST", galleryPath(gallery, "/values:list"), { field, page_size, prefix });
  const values = (reply.values ?? []).map(({ value, items }) => [Object.values(value)[0], items]);
  return { values, distinct: Number(reply.distinct ?? 0) };
}

/** Unpack float32, little-endian. */
export const floats = (base64) => new Float32Array(bytes(base64).buffer);

/** Unpack bytes. */
export const bytes = (base64) => Uint8Array.from(atob(base64 ?? ""), (letter) => letter.charCodeAt(0));

/** Pack bytes or a typed array of them. */
export function base64(array) {
  const all = new Uint8Array(array.buffer ?? array, array.byteOffset ?? 0, array.byteLength);
  let text = "";
  for (let at = 0; at < all.length; at += 32768) text += String.fromCharCode(...all.subarray(at, at + 32768));
  return btoa(text);
}

/** Pack a file. */
export const base64Of = async (blob) => base64(await blob.arrayBuffer());

/** The address of a thumbnail, for an <img>; null where there is none. */
export const picture = (base64) => (base64 ? `data:image/jpeg;base64,${base64}` : null);
