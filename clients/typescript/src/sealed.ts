/**
 * Open a sealed key: HPKE (RFC 9180) in base mode with DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM, empty info
 * and aad.
 */

import { type KeyObject, createDecipheriv, createHmac, createPrivateKey, createPublicKey, diffieHellman } from "node:crypto";

/** A key string that only the holder of a recipient key can open. Both are base64url without padding. */
export interface Sealed {
  enc: string;
  ciphertext: string;
}

/** The text was altered, or sealed to another recipient key. */
export class SealedError extends Error {
  override readonly name = "SealedError";
}

const KEY_BYTES = 32;
const TAG_BYTES = 16;
const KEM_SUITE = Buffer.from("KEM\x00\x20", "latin1");
const HPKE_SUITE = Buffer.from("HPKE\x00\x20\x00\x01\x00\x02", "latin1");

// The DER head of a PKCS #8 private key and of a SubjectPublicKeyInfo, before the 32 bytes of X25519 (RFC 8410).
const PRIVATE_HEAD = Buffer.from("302e020100300506032b656e04220420", "hex");
const PUBLIC_HEAD = Buffer.from("302a300506032b656e032100", "hex");

/** Decrypt with the recipient's private key: 32 bytes of X25519 in base64url without padding. Throws SealedError. */
export function openSealed(privateKey: string, sealed: Sealed): string {
  try {
    return open(decode(privateKey, KEY_BYTES), decode(sealed.enc, KEY_BYTES), decode(sealed.ciphertext));
  } catch {
    throw new SealedError("The sealed key cannot be opened with this private key.");
  }
}

function decode(text: string, length?: number): Buffer {
  const bytes = Buffer.from(text, "base64url");
  if (bytes.toString("base64url") !== text || (length !== undefined && bytes.length !== length)) {
    throw new SealedError("not base64url of the expected length");
  }
  return bytes;
}

/** RFC 9180: Decap (4.1), KeySchedule in base mode (5.1), and the first message (5.2). */
function open(secret: Buffer, enc: Buffer, sealed: Buffer): string {
  const recipient = createPrivateKey({ key: Buffer.concat([PRIVATE_HEAD, secret]), format: "der", type: "pkcs8" });
  const ephemeral = createPublicKey({ key: Buffer.concat([PUBLIC_HEAD, enc]), format: "der", type: "spki" });
  // OpenSSL refuses points of low order.
  const dh = diffieHellman({ privateKey: recipient, publicKey: ephemeral });
  const kemContext = Buffer.concat([enc, publicBytes(recipient)]);
  const shared = expand(KEM_SUITE, extract(KEM_SUITE, "", "eae_prk", dh), "shared_secret", kemContext, KEY_BYTES);

  const modeBase = Buffer.from([0]);
  const context = Buffer.concat([
    modeBase,
    extract(HPKE_SUITE, "", "psk_id_hash", ""),
    extract(HPKE_SUITE, "", "info_hash", ""),
  ]);
  const prk = extract(HPKE_SUITE, shared, "secret", "");
  const key = expand(HPKE_SUITE, prk, "key", context, 32);
  const nonce = expand(HPKE_SUITE, prk, "base_nonce", context, 12);

  const cipher = createDecipheriv("aes-256-gcm", key, nonce, { authTagLength: TAG_BYTES });
  cipher.setAuthTag(sealed.subarray(-TAG_BYTES));
  return cipher.update(sealed.subarray(0, -TAG_BYTES)).toString("latin1") + cipher.final("latin1");
}

function publicBytes(privateKey: KeyObject): Buffer {
  return createPublicKey(privateKey).export({ format: "der", type: "spki" }).subarray(PUBLIC_HEAD.length);
}

/** LabeledExtract of RFC 9180, section 4. */
function extract(suite: Buffer, salt: Buffer | "", label: string, material: Buffer | ""): Buffer {
  const text = Buffer.concat([Buffer.from("HPKE-v1"), suite, Buffer.from(label), Buffer.from(material)]);
  return createHmac("sha256", salt === "" ? Buffer.alloc(32) : salt).update(text).digest();
}

/** LabeledExpand of RFC 9180, section 4: one block of HKDF-Expand is enough for 32 bytes. */
function expand(suite: Buffer, prk: Buffer, label: string, info: Buffer, length: number): Buffer {
  const head = Buffer.from([length >> 8, length & 0xff]);
  const text = Buffer.concat([head, Buffer.from("HPKE-v1"), suite, Buffer.from(label), info, Buffer.from([1])]);
  return createHmac("sha256", prk).update(text).digest().subarray(0, length);
}
