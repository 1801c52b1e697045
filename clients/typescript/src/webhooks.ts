/** Verify webhooks: Standard Webhooks 1.0.0. */

import { createHmac, timingSafeEqual } from "node:crypto";

/** Largest difference between a message's timestamp and this machine's clock, in seconds. */
const TOLERANCE_SECONDS = 300;

/** The message is not from the service, or too old. Answer 401. */
export class WebhookSignatureError extends Error {
  override readonly name = "WebhookSignatureError";
}

/** The receiver's own configuration is not valid. */
export class WebhookSecretError extends Error {
  override readonly name = "WebhookSecretError";
}

type HeaderSource = Headers | Readonly<Record<string, string | readonly string[] | undefined>>;

/**
 * Verify a message and return its id. Retries have the same id: process each id once.
 *
 * `body` is the received body, unchanged. Give the old and the new secret during a rotation. `now` is in milliseconds.
 * Throws WebhookSignatureError, WebhookSecretError.
 */
export function verifyWebhook(
  headers: HeaderSource,
  body: Uint8Array | string,
  secrets: readonly string[],
  now: number = Date.now(),
): string {
  const keys = secrets.map(readSecret);
  if (keys.length === 0) {
    throw new WebhookSecretError("There is no webhook secret.");
  }
  const [id, timestamp, signatures] = ["webhook-id", "webhook-timestamp", "webhook-signature"].map((name) =>
    readHeader(headers, name),
  ) as [string, string, string];
  if (id === "" || !/^[0-9]{1,12}$/.test(timestamp)) {
    throw new WebhookSignatureError("A header is missing or unreadable.");
  }
  if (Math.abs(now - Number(timestamp) * 1000) > TOLERANCE_SECONDS * 1000) {
    throw new WebhookSignatureError("The timestamp is out of tolerance.");
  }
  // Compares all, so that the time does not reveal which one matches.
  let matches = false;
  for (const key of keys) {
    const mac = createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest("base64");
    const expected = Buffer.from(`v1,${mac}`);
    for (const text of signatures.split(" ")) {
      const given = Buffer.from(text);
      matches = (given.length === expected.length && timingSafeEqual(given, expected)) || matches;
    }
  }
  if (!matches) {
    throw new WebhookSignatureError("No signature matches.");
  }
  return id;
}

function readHeader(headers: HeaderSource, name: string): string {
  if (headers instanceof Headers) {
    return headers.get(name) ?? "";
  }
  const found = Object.entries(headers).find(([each]) => each.toLowerCase() === name)?.[1];
  return typeof found === "string" ? found : "";
}

function readSecret(secret: string): Buffer {
  const text = secret.replace(/^whsec_/, "");
  const key = Buffer.from(text, "base64");
  if (text === secret || key.toString("base64") !== text || key.length < 24 || key.length > 64) {
    throw new WebhookSecretError("A webhook secret is whsec_ and the base64 of 24 to 64 bytes.");
  }
  return key;
}
