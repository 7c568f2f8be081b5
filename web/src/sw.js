/** Keeps the page for visits without a network, and says of its files that the page is isolated, which threads need. */

const KEPT = "page";
const FILES = ["./", "page.js", "markdown.js", "style.css", "worker.js", "ort.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"];

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(KEPT).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()));
});
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

/** A newer file is taken where there is a network: the page and its parts are of one version. */
async function answer(request) {
  const cache = await caches.open(KEPT);
  const plain = request.url.split("?")[0];
  let found;
  try {
    found = await fetch(request);
    if (found.ok) await cache.put(plain, found.clone());
  } catch {
    found = await cache.match(plain);
    if (!found) return Response.error();
  }
  const headers = new Headers(found.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  headers.set("Cross-Origin-Resource-Policy", "same-origin");
  return new Response(found.body, { status: found.status, statusText: found.statusText, headers });
}

self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  const ours = url.origin === location.origin && FILES.some((f) => new URL(f, location.href).pathname === url.pathname);
  if (event.request.method === "GET" && ours) event.respondWith(answer(event.request));
});
