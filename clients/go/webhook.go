package keyvault

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// WebhookTolerance is the largest difference between a message's timestamp and this machine's clock.
const WebhookTolerance = 5 * time.Minute

// Errors of VerifyWebhook.
var (
	// ErrWebhookSignature: the message is not from the service, or too old. Answer 401.
	ErrWebhookSignature = errors.New("keyvault: the webhook's signature or timestamp is not valid")
	// ErrWebhookSecret: the receiver's own configuration is not valid.
	ErrWebhookSecret = errors.New("keyvault: a webhook secret is whsec_ and the base64 of 24 to 64 bytes")
)

var timestampText = regexp.MustCompile(`\A[0-9]{1,12}\z`)

// VerifyWebhook verifies a message and returns its id. Retries have the same id: process each id once.
//
// body is the received body, unchanged. Give the old and the new secret during a rotation.
func VerifyWebhook(header http.Header, body []byte, secrets ...Secret) (string, error) {
	return verifyWebhook(header, body, time.Now(), secrets)
}

func verifyWebhook(header http.Header, body []byte, now time.Time, secrets []Secret) (string, error) {
	keys := make([][]byte, 0, len(secrets))
	for _, secret := range secrets {
		key, err := webhookKey(secret)
		if err != nil {
			return "", err
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return "", ErrWebhookSecret
	}
	id, timestamp := header.Get("webhook-id"), header.Get("webhook-timestamp")
	if id == "" || !timestampText.MatchString(timestamp) {
		return "", ErrWebhookSignature
	}
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil || now.Sub(time.Unix(seconds, 0)).Abs() > WebhookTolerance {
		return "", ErrWebhookSignature
	}
	// Compares all, so that the time does not reveal which one matches.
	matches := false
	for _, key := range keys {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(id + "." + timestamp + "."))
		mac.Write(body)
		expected := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
		for given := range strings.SplitSeq(header.Get("webhook-signature"), " ") {
			matches = hmac.Equal([]byte(expected), []byte(given)) || matches
		}
	}
	if !matches {
		return "", ErrWebhookSignature
	}
	return id, nil
}

func webhookKey(secret Secret) ([]byte, error) {
	text, hasPrefix := strings.CutPrefix(secret.Reveal(), "whsec_")
	key, err := base64.StdEncoding.Strict().DecodeString(text)
	if !hasPrefix || err != nil || len(key) < 24 || len(key) > 64 {
		return nil, ErrWebhookSecret
	}
	return key, nil
}
