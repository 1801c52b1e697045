/** Client of Keyvault: verifier and middleware for backend services; client, webhooks and sealed keys for merchants. */

export type { Environment, Refusal } from "./connection.js";
export { RefusedError } from "./connection.js";
export type { Decision, Identity, Question, VerifierOptions } from "./verifier.js";
export { Verifier } from "./verifier.js";
export type { ProtectOptions } from "./middleware.js";
export { expressMiddleware, honoMiddleware, identityOf, protect } from "./middleware.js";
export type { MerchantOptions, MerchantRequest, MerchantResponse } from "./merchant.js";
export { KeyvaultError, Merchant, keyFile } from "./merchant.js";
export { WebhookSecretError, WebhookSignatureError, verifyWebhook } from "./webhooks.js";
export type { Sealed } from "./sealed.js";
export { SealedError, openSealed } from "./sealed.js";
