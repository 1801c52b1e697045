/** The cases of ../conformance.json, which the Python and the Go client run, too. */

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";

import { getRequestListener } from "@hono/node-server";
import express from "express";
import { Hono } from "hono";

import {
  KeyvaultError,
  Merchant,
  RefusedError,
  SealedError,
  Verifier,
  WebhookSecretError,
  WebhookSignatureError,
  expressMiddleware,
  honoMiddleware,
  identityOf,
  openSealed,
  protect,
  verifyWebhook,
} from "../dist/index.js";
import { KEYS, Service, checkNoKey, conformance, listen, sendRaw } from "./service.mjs";

/** Each framework's protected server. `seen` gets the identity of each request that is let through. */
const FRAMEWORKS = {
  express(verifier, seen) {
    const app = express();
    app.use(expressMiddleware(verifier));
    app.use((request, response) => {
      seen.push(identityOf(request));
      response.status(207).end();
    });
    return createServer(app);
  },
  hono(verifier, seen) {
    const app = new Hono();
    app.use(honoMiddleware(verifier));
    app.all("*", (context) => {
      seen.push(identityOf(context.req.raw));
      return context.body(null, 207);
    });
    return createServer(getRequestListener(app.fetch));
  },
  fetch(verifier, seen) {
    const handler = protect(
      verifier,
      (request) => {
        seen.push(identityOf(request));
        return new Response(null, { status: 207 });
      },
      { peerAddress: () => "127.0.0.1" },
    );
    return createServer(getRequestListener(handler));
  },
};

for (const [framework, serve] of Object.entries(FRAMEWORKS)) {
  for (const each of conformance.verdicts) {
    test(`${framework}: ${each.name}`, async (t) => {
      const other = await Service.start(t, { host: "localhost" });
      const service = await Service.start(t, { other, replies: [each.reply] });
      if (each.reply.fault === "refuse") {
        await new Promise((resolve) => service.server.close(resolve));
      }
      const causes = [];
      const verifier = new Verifier({
        url: service.url,
        environment: "sandbox",
        serviceToken: KEYS.service_token,
        timeoutMs: (each.deadline_seconds ?? 5) * 1000,
        onUndecided: (cause) => causes.push(cause),
      });
      const seen = [];
      const url = await listen(t, serve(verifier, seen));
      const answer = await sendRaw(url, each.incoming.method, each.incoming.path, each.incoming.headers);

      if (each.reply.fault !== "refuse") {
        assert.equal(service.received.length, 1);
        const [question] = service.received;
        assert.deepEqual(JSON.parse(question.body), each.asked);
        assert.equal(question.method, "POST");
        assert.equal(question.path, "/v1/keys/verify");
        assert.equal(question.headers.authorization, `Bearer ${KEYS.service_token}`);
      }
      assert.equal(other.received.length, 0);
      checkNoKey(verifier, causes);
      checkAnswer(answer, seen, each.expect);
      if (each.reply.fault !== undefined) {
        assert.equal(causes.length, 1);
      }
    });
  }
}

function checkAnswer(answer, seen, expect) {
  for (const [name, value] of Object.entries(expect.headers)) {
    assert.equal(answer.headers.get(name), value, name);
  }
  for (const name of expect.absent_headers ?? []) {
    assert.equal(answer.headers.get(name), null, name);
  }
  if (expect.allowed) {
    assert.equal(answer.status, 207);
    const { keyId, credentialId, kind, merchantId, environment, customerId } = seen[0];
    const found = { key_id: keyId, credential_id: credentialId, kind, merchant_id: merchantId, environment, customer_id: customerId };
    assert.deepEqual([found], [expect.identity]);
    assert.equal(seen.length, 1);
    return;
  }
  assert.deepEqual(seen, []);
  assert.equal(answer.status, expect.status);
  const problem = JSON.parse(answer.body);
  assert.deepEqual({ ...problem, ...expect.problem }, problem);
}

for (const each of conformance.requests) {
  test(`request: ${each.name}`, async (t) => {
    const other = await Service.start(t, { host: "localhost" });
    const service = await Service.start(t, { other });
    const names = [...each.client.keys];
    const waits = [];
    const merchant = new Merchant({
      baseUrl: service.url + each.client.base_path,
      environment: each.client.environment,
      key: () => KEYS[names.length > 1 ? names.shift() : names[0]],
      maxAttempts: each.client.max_attempts,
      retryBudget: each.client.retry_budget,
      deadlineMs: each.client.deadline_seconds * 1000,
      sleep: async (ms) => waits.push(ms / 1000),
    });
    const idempotencyKeys = new Set();
    for (const call of each.calls) {
      const { expect } = call;
      waits.length = 0;
      service.begin(call.replies);
      const result = await merchant
        .send({
          method: call.method,
          path: call.path,
          ...(call.body === null ? {} : { body: call.body }),
          ...(call.idempotency_key === undefined ? {} : { idempotencyKey: call.idempotency_key }),
          ...(call.customer_token === undefined ? {} : { customerToken: KEYS[call.customer_token] }),
        })
        .catch((error) => error);
      checkResult(result, expect);
      checkNoKey(merchant, result);
      assert.equal(service.received.length, expect.attempts);
      assert.equal(waits.length, expect.waits.length);
      expect.waits.forEach((wait, number) => {
        assert(waits[number] >= wait.at_least && waits[number] <= wait.at_most, `${waits}`);
      });
      const idempotencyKey = service.received[0].headers["idempotency-key"];
      assert.equal(idempotencyKey !== undefined, call.method === "POST");
      assert(!idempotencyKeys.has(idempotencyKey) || call.method !== "POST");
      idempotencyKeys.add(idempotencyKey);
      if (call.idempotency_key !== undefined) {
        assert.equal(idempotencyKey, call.idempotency_key);
      }
      service.received.forEach((attempt, number) => {
        assert.equal(attempt.method, call.method);
        assert.equal(attempt.path, each.client.base_path + call.path);
        assert.equal(attempt.body, call.body ?? "");
        assert.equal(attempt.headers["idempotency-key"], idempotencyKey);
        assert.equal(attempt.headers["x-api-key"], KEYS[each.client.keys[number] ?? each.client.keys.at(-1)]);
        const bearer = expect.authorization?.replace("{customer_token}", KEYS.customer_token);
        assert.equal(attempt.headers.authorization, bearer);
      });
      assert.equal(other.received.length, 0);
    }
  });
}

function checkResult(result, expect) {
  if (expect.error === undefined) {
    assert.deepEqual([result.status, result.json], [expect.status, expect.json]);
    return;
  }
  assert(result instanceof KeyvaultError, `${result}`);
  const { status, code, check, requestId, retryAfterSeconds } = result;
  const found = { status, code, check, request_id: requestId, retry_after_seconds: retryAfterSeconds };
  assert.deepEqual({ ...found, ...expect.error }, found);
  assert.match(result.message, /^[\x20-\x7e]+$/);
}

for (const each of conformance.refusals) {
  test(`refusal: ${each.client}: ${each.name}`, async (t) => {
    const fetching = t.mock.method(globalThis, "fetch", () => assert.fail("a request was sent"));
    const key = each.key_text ?? KEYS[each.key];
    const call = async () => {
      if (each.client === "verifier") {
        return new Verifier({ url: each.base_url, environment: each.environment, serviceToken: key });
      }
      const merchant = new Merchant({ baseUrl: each.base_url, environment: each.environment, key });
      return merchant.send({
        method: each.method,
        path: each.path,
        body: "{}",
        ...(each.idempotency_key === undefined ? {} : { idempotencyKey: each.idempotency_key }),
        ...(each.customer_token === undefined ? {} : { customerToken: KEYS[each.customer_token] }),
      });
    };
    const error = await call().then(
      () => assert.fail("not refused"),
      (refused) => refused,
    );
    assert(error instanceof RefusedError, `${error}`);
    assert.equal(error.refusal, each.refusal);
    assert.equal(fetching.mock.callCount(), 0);
    checkNoKey(error);
  });
}

const WEBHOOK_ERRORS = { signature: WebhookSignatureError, secret: WebhookSecretError };

for (const each of conformance.webhooks) {
  test(`webhook: ${each.name}`, () => {
    for (const headers of [each.headers, new Headers(each.headers)]) {
      const verify = () => verifyWebhook(headers, Buffer.from(each.body), each.secrets, each.now * 1000);
      if (each.expect.error === undefined) {
        assert.equal(verify(), each.expect.id);
      } else {
        assert.throws(verify, WEBHOOK_ERRORS[each.expect.error]);
      }
    }
  });
}

for (const each of conformance.sealed) {
  test(`sealed: ${each.name}`, () => {
    if (each.expect.error === undefined) {
      assert.equal(openSealed(each.private_key, each.sealed), each.expect.text);
    } else {
      assert.throws(() => openSealed(each.private_key, each.sealed), SealedError);
    }
  });
}
