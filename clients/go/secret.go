package keyvault

import (
	"fmt"
	"log/slog"
	"regexp"
)

// Secret is a key string or a token. It is never printed: fmt, slog and encoding/json show "(redacted)".
type Secret string

const redacted = "(redacted)"

// Reveal returns the text.
func (s Secret) Reveal() string { return string(s) }

// Format implements fmt.Formatter for all verbs.
func (s Secret) Format(state fmt.State, _ rune) { _, _ = state.Write([]byte(redacted)) }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler, which encoding/json uses.
func (s Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

var (
	keyString = regexp.MustCompile(`\A[a-z][a-z0-9]{0,15}_(pub|prv|cat|svc)_(sbx|prd|all)_[0-9A-Za-z]{65}\z`)
	keyShaped = regexp.MustCompile(`_(?:pub|prv|cat|svc)_(?:sbx|prd|all)_[0-9A-Za-z]{16}`)
)

// kindAndScope returns the second and third field of a key string, and empty texts for anything else. The checksum is
// left to the service.
func (s Secret) kindAndScope() (kind, scope string) {
	if found := keyString.FindStringSubmatch(string(s)); found != nil {
		return found[1], found[2]
	}
	return "", ""
}
