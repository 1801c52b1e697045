/** What the cases of conformance.json do not cover: options of the middleware, key files, deadlines. */

import assert from "node:assert/strict";
import { mkdtemp, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { getRequestListener } from "@hono/node-server";

import { KeyvaultError, Merchant, Verifier, expressMiddleware, identityOf, keyFile, protect } from "../dist/index.js";
import { KEYS, Service, checkNoKey, conformance, listen, sendRaw } from "./service.mjs";

const ALLOWED = conformance.verdicts[0].reply;
const JSON_TYPE = { "Content-Type": "application/json" };

function verifierOf(service, options = {}) {
  return new Verifier({ url: service.url, environment: "sandbox", serviceToken: KEYS.service_token, ...options });
}

const OPTIONS = [
  ["an endpoint", "", { endpoint: "orders.create" }, { endpoint: "orders.create", method: undefined, path: undefined }],
  ["no trusted proxy", "192.0.2.1", {}, { client_ip: "127.0.0.1" }],
  ["a trusted proxy", "203.0.113.9, 192.0.2.1", { trustedProxies: 1 }, { client_ip: "192.0.2.1" }],
  ["two trusted proxies", "203.0.113.9, 192.0.2.1", { trustedProxies: 2 }, { client_ip: "203.0.113.9" }],
  ["fewer entries than proxies", "192.0.2.1", { trustedProxies: 2 }, { client_ip: undefined }],
  ["an entry that is no address", "unknown", { trustedProxies: 1 }, { client_ip: undefined }],
  ["an entry with a port", "[::ffff:192.0.2.1]:80", { trustedProxies: 1 }, { client_ip: "192.0.2.1" }],
  ["the peer of a proxy", "", { peerAddress: () => "192.0.2.9" }, { client_ip: "192.0.2.9" }],
  ["a merchant", "", { question: (request) => ({ merchant: request.headers["x-shop"] }) }, { merchant: "acme" }],
];

for (const [name, forwarded, options, expected] of OPTIONS) {
  test(`options: ${name}`, async (t) => {
    const service = await Service.start(t, { replies: [ALLOWED] });
    const middleware = expressMiddleware(verifierOf(service), options);
    const shop = createServer((request, response) => middleware(request, response, () => response.end()));
    const headers = [
      ["X-Forwarded-For", forwarded],
      ["X-Shop", "acme"],
    ];
    assert.equal((await sendRaw(await listen(t, shop), "GET", "/x", headers)).status, 200);
    const asked = JSON.parse(service.received[0].body);
    for (const [member, value] of Object.entries(expected)) {
      assert.equal(asked[member], value, member);
    }
  });
}

test("a mounted middleware asks about the whole path", async (t) => {
  const service = await Service.start(t, { replies: [ALLOWED] });
  const middleware = expressMiddleware(verifierOf(service));
  const shop = createServer((request, response) => {
    request.originalUrl = request.url; // as Express does
    request.url = "/rest";
    middleware(request, response, () => response.end());
  });
  await sendRaw(await listen(t, shop), "GET", "/mounted/rest", []);
  assert.equal(JSON.parse(service.received[0].body).path, "/mounted/rest");
});

test("a fetch handler may return a response with immutable headers", async (t) => {
  const service = await Service.start(t, { replies: [ALLOWED, { status: 207, headers: {}, text: "in" }] });
  const shop = createServer(getRequestListener(protect(verifierOf(service), () => fetch(service.url))));
  const answer = await sendRaw(await listen(t, shop), "GET", "/x", []);
  assert.deepEqual([answer.status, answer.body], [207, "in"]);
  assert.equal(answer.headers.get("ratelimit-policy"), ALLOWED.body.headers["RateLimit-Policy"]);
});

test("a request that was not protected has no identity", () => {
  assert.equal(identityOf(new Request("http://localhost")), undefined);
});

test("the default warning names the cause and no key", async (t) => {
  const warn = t.mock.method(console, "warn", () => {});
  const service = await Service.start(t, { replies: [{ fault: "cut" }] });
  const decision = await verifierOf(service).verify({ key: KEYS.private_sandbox, endpoint: "orders.create" });
  assert.equal(decision.status, 503);
  assert.equal(warn.mock.callCount(), 1);
  checkNoKey(warn.mock.calls[0].arguments, decision.cause);
});

test("a merchant reads the key file again after a refusal", async (t) => {
  const path = join(await mkdtemp(join(tmpdir(), "keyvault-")), "key");
  const refused = { status: 401, headers: { "Content-Type": "application/problem+json" }, body: { code: "key_revoked" } };
  const found = { status: 200, headers: JSON_TYPE, body: {} };
  const service = await Service.start(t, { replies: [found, refused, found] });
  const merchant = new Merchant({ baseUrl: service.url, environment: "sandbox", key: keyFile(path) });
  for (const name of ["private_sandbox", "private_sandbox_2"]) {
    await writeFile(path, `${KEYS[name]}\n`);
    await merchant.send({ method: "GET", path: "/x" });
  }
  const sent = service.received.map((request) => request.headers["x-api-key"]);
  assert.deepEqual(sent, [KEYS.private_sandbox, KEYS.private_sandbox, KEYS.private_sandbox_2]);
});

test("a merchant ends at its deadline", async (t) => {
  const service = await Service.start(t, { replies: [{ fault: "silent" }] });
  const merchant = new Merchant({ baseUrl: service.url, environment: "sandbox", key: KEYS.private_sandbox, deadlineMs: 50 });
  const error = await merchant.send({ method: "GET", path: "/x" }).catch((failed) => failed);
  assert(error instanceof KeyvaultError);
  assert.equal(error.status, 0);
});
