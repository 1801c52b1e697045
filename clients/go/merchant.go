package keyvault

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	mathrand "math/rand/v2"
	"mime"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	backoffBase = 500 * time.Millisecond
	backoffCap  = 8 * time.Second
	// retryCost is what a retry spends. A call that succeeds with its first attempt earns 1.
	retryCost = 10
)

// KeySource returns the API key to use. It is called for the first request, and again after the service refused the key.
type KeySource func(context.Context) (Secret, error)

// StaticKey returns a source of one key.
func StaticKey(key Secret) KeySource {
	return func(context.Context) (Secret, error) { return key, nil }
}

// KeyFile returns a source that reads a file, without white space at its ends.
func KeyFile(path string) KeySource {
	return func(context.Context) (Secret, error) {
		text, err := os.ReadFile(path)
		return Secret(strings.TrimSpace(string(text))), err
	}
}

// MerchantConfig configures a Merchant.
type MerchantConfig struct {
	// BaseURL is the environment's base URL, such as https://api.example/sandbox.
	BaseURL     string
	Environment Environment
	Key         KeySource
	// MaxAttempts of one call; 20 by default, as many as fit into the default Deadline.
	MaxAttempts int
	// RetryBudget is the number of retries that all calls share; 100 by default.
	RetryBudget int
	// Deadline of one call with all its attempts and waits; 60 seconds by default. Calls outlive a restart of the service
	// that is shorter.
	Deadline time.Duration
	// AttemptTimeout of one attempt; 20 seconds by default.
	AttemptTimeout time.Duration
}

// Merchant sends requests of a merchant's backend. It is safe for concurrent use.
type Merchant struct {
	base        *url.URL
	environment Environment
	source      KeySource
	maxAttempts int
	deadline    time.Duration
	timeout     time.Duration
	client      *http.Client
	sleep       func(context.Context, time.Duration) error

	mutex   sync.Mutex
	key     func() Secret // nil before the first request
	budget  int
	fullest int
}

// NewMerchant returns a client, or a *RefusedError for a configuration that would disclose the key.
func NewMerchant(config MerchantConfig) (*Merchant, error) {
	base, err := parseBaseURL(config.BaseURL)
	if err != nil {
		return nil, err
	}
	if err := checkEnvironment(config.Environment, base); err != nil {
		return nil, err
	}
	if config.Key == nil {
		return nil, refuse(RefusedKey, "the client has no key source. Use StaticKey or KeyFile.")
	}
	budget := retryCost * orDefault(config.RetryBudget, 100)
	return &Merchant{
		base:        base,
		environment: config.Environment,
		source:      config.Key,
		maxAttempts: orDefault(config.MaxAttempts, 20),
		deadline:    orDefault(config.Deadline, 60*time.Second),
		timeout:     orDefault(config.AttemptTimeout, 20*time.Second),
		client:      newHTTPClient(""),
		sleep:       sleep,
		budget:      budget,
		fullest:     budget,
	}, nil
}

func orDefault[T int | time.Duration](value, otherwise T) T {
	if value <= 0 {
		return otherwise
	}
	return value
}

func sleep(ctx context.Context, duration time.Duration) error {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// Request is one call. Path is relative to the base URL, such as /merchants/orders.
type Request struct {
	Method string
	Path   string
	// Body is JSON, sent unchanged with each attempt.
	Body []byte
	// IdempotencyKey of a POST or PATCH. By default each call gets a new one. To repeat a call after an error, give the
	// key and the body of the first.
	IdempotencyKey string
	// CustomerToken is a customer access token, where the endpoint supports it.
	CustomerToken Secret
}

// Response is a success. Body is JSON, or empty.
type Response struct {
	Status int
	Header http.Header
	Body   json.RawMessage
}

// Error is an answer that is no success, or the reason why there is none.
type Error struct {
	// Status is 0 without an answer.
	Status int
	// Code, Check and RequestID come from the problem document; empty, 0 and empty without one. Report the RequestID to
	// support. Check is the item of the error checklist to check.
	Code      string
	Check     int
	RequestID string
	// RetryAfter is the least wait that the answer asks for.
	RetryAfter time.Duration
	// Err is the cause of a missing answer.
	Err error
}

func (e *Error) Error() string {
	if e.Status == 0 {
		return fmt.Sprintf("keyvault: no answer: %v", e.Err)
	}
	return fmt.Sprintf("keyvault: %d %s, request_id %+.80q", e.Status, printable(e.Code), e.RequestID)
}

func (e *Error) Unwrap() error { return e.Err }

var reloads = map[string]bool{
	"credential_invalid": true, "environment_mismatch": true, "key_not_active": true, "key_expired": true, "key_revoked": true,
}

// Do sends a request and returns its success, a *RefusedError before anything is sent, or an *Error.
func (m *Merchant) Do(ctx context.Context, call Request) (*Response, error) {
	ctx, cancel := context.WithTimeout(ctx, m.deadline)
	defer cancel()
	prepared, err := m.prepare(ctx, call)
	if err != nil {
		return nil, err
	}
	mayReload := true
	for attempt := 1; ; attempt++ {
		response, failed := m.attempt(ctx, prepared)
		if failed == nil {
			if attempt == 1 {
				m.earn()
			}
			return response, nil
		}
		if failed.Status == http.StatusUnauthorized && reloads[failed.Code] && mayReload {
			mayReload = false
			isChanged, err := m.reload(ctx, prepared)
			if err != nil {
				return nil, err
			}
			if isChanged {
				continue
			}
		}
		if !failed.isTemporary() || attempt >= m.maxAttempts || ctx.Err() != nil {
			return nil, failed
		}
		wait := max(failed.RetryAfter, backoff(attempt))
		if end, _ := ctx.Deadline(); time.Until(end) < wait || !m.spend() {
			return nil, failed
		}
		if m.sleep(ctx, wait) != nil {
			return nil, failed
		}
	}
}

// prepared is a call that passed all checks.
type prepared struct {
	Request
	url string
	key Secret
}

func (m *Merchant) prepare(ctx context.Context, call Request) (*prepared, error) {
	target, err := m.target(call.Path)
	if err != nil {
		return nil, err
	}
	if kind, scope := call.CustomerToken.kindAndScope(); call.CustomerToken != "" && (kind != "cat" || scope != scopes[m.environment]) {
		return nil, refuse(RefusedBearer, "the customer access token is not one of this environment.")
	}
	if call.Method == http.MethodPost || call.Method == http.MethodPatch {
		if call.IdempotencyKey == "" {
			call.IdempotencyKey = newIdempotencyKey()
		}
	}
	if call.IdempotencyKey != "" && !idempotencyText.MatchString(call.IdempotencyKey) {
		return nil, refuse(RefusedIdempotencyKey, "the Idempotency-Key has not 1 to 255 printable ASCII characters.")
	}
	key, err := m.current(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.checkKey(key, call.Path); err != nil {
		return nil, err
	}
	return &prepared{call, target, key}, nil
}

var (
	idempotencyText = regexp.MustCompile(`\A[\x20-\x7e]{1,255}\z`)
	pathText        = regexp.MustCompile(`\A/[\x21-\x7e]*\z`)
)

// target returns the URL of a path. Only paths that every server reads alike are accepted.
func (m *Merchant) target(path string) (string, error) {
	route, _, _ := strings.Cut(path, "?")
	unescaped, err := url.PathUnescape(path)
	if err != nil || !pathText.MatchString(path) || strings.HasPrefix(path, "//") || strings.ContainsAny(path, "\\#") {
		return "", refuse(RefusedPath, "the path is not valid. Use an absolute path of visible ASCII characters.")
	}
	if keyShaped.MatchString(path) || keyShaped.MatchString(unescaped) {
		return "", refuse(RefusedPath, "the path contains a key. Logs and proxies store URLs.")
	}
	unescapedRoute, _ := url.PathUnescape(route)
	for segment := range strings.SplitSeq(unescapedRoute, "/") {
		if segment == "." || segment == ".." {
			return "", refuse(RefusedPath, "the path contains a dot segment.")
		}
	}
	return m.base.String() + path, nil
}

func (m *Merchant) checkKey(key Secret, path string) error {
	kind, scope := key.kindAndScope()
	switch {
	case kind != "prv" && kind != "pub":
		return refuse(RefusedKey, "the key source did not return an API key.")
	case scope != scopes[m.environment]:
		return refuse(RefusedEnvironment, "the key is not of %s. Use that environment's key.", m.environment)
	case kind == "pub" && path != "/client/configuration":
		return refuse(RefusedKind, "the endpoint requires a private key, and the key is public.")
	}
	return nil
}

func newIdempotencyKey() string {
	random := make([]byte, 16)
	_, _ = rand.Read(random) // never fails
	return hex.EncodeToString(random)
}

func (m *Merchant) current(ctx context.Context) (Secret, error) {
	m.mutex.Lock()
	key := m.key
	m.mutex.Unlock()
	if key != nil {
		return key(), nil
	}
	return m.load(ctx)
}

func (m *Merchant) load(ctx context.Context) (Secret, error) {
	key, err := m.source(ctx)
	if err != nil {
		return "", &RefusedError{RefusedKey, "the key source failed: " + err.Error()}
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.key = func() Secret { return key }
	return key, nil
}

// reload reads the key again after a refusal, and reports whether it changed. Another call may have done so already.
func (m *Merchant) reload(ctx context.Context, call *prepared) (bool, error) {
	refused := call.key
	key, err := m.current(ctx)
	if err == nil && key == refused {
		key, err = m.load(ctx)
	}
	if err == nil {
		err = m.checkKey(key, call.Path)
	}
	call.key = key
	return key != refused, err
}

func (m *Merchant) attempt(ctx context.Context, call *prepared) (*Response, *Error) {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, call.Method, call.url, bytes.NewReader(call.Body))
	if err != nil {
		return nil, &Error{Err: err}
	}
	request.Header.Set("X-Api-Key", call.key.Reveal())
	request.Header.Set("Accept", "application/json")
	if len(call.Body) > 0 {
		request.Header.Set("Content-Type", "application/json")
	}
	if call.IdempotencyKey != "" {
		request.Header.Set("Idempotency-Key", call.IdempotencyKey)
	}
	if call.CustomerToken != "" {
		request.Header.Set("Authorization", "Bearer "+call.CustomerToken.Reveal())
	}
	reply, body, err := send(m.client, request)
	if err != nil {
		return nil, &Error{Err: err}
	}
	if reply.StatusCode < 200 || reply.StatusCode > 299 {
		return nil, readError(reply, body)
	}
	mediaType, _, _ := mime.ParseMediaType(reply.Header.Get("Content-Type"))
	if len(body) > 0 && (mediaType != "application/json" || !json.Valid(body)) {
		return nil, &Error{Status: reply.StatusCode, Err: errors.New("the answer is not JSON")}
	}
	return &Response{reply.StatusCode, reply.Header, body}, nil
}

func readError(reply *http.Response, body []byte) *Error {
	failed := &Error{Status: reply.StatusCode, RetryAfter: retryAfter(reply.Header.Get("Retry-After"), time.Now())}
	var problem map[string]any
	if json.Unmarshal(body, &problem) == nil {
		failed.Code, _ = problem["code"].(string)
		failed.RequestID, _ = problem["request_id"].(string)
		if check, isNumber := problem["check"].(float64); isNumber && check == math.Trunc(check) && math.Abs(check) < 1000 {
			failed.Check = int(check)
		}
	}
	return failed
}

// isTemporary reports whether the same request may succeed later.
func (e *Error) isTemporary() bool {
	switch e.Status {
	case 0, http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable,
		http.StatusGatewayTimeout:
		return true
	case http.StatusConflict:
		return e.Code == "idempotency_in_progress"
	}
	return false
}

// retryAfter reads seconds or an HTTP date (RFC 9110, 10.2.3). It returns 0 for other text and past dates.
func retryAfter(text string, now time.Time) time.Duration {
	if wholeSeconds.MatchString(text) {
		seconds, _ := strconv.Atoi(text)
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	return max(at.Sub(now), 0)
}

// backoff returns a random wait before the retry with this number, from 1: exponential, with full jitter.
func backoff(retry int) time.Duration {
	longest := backoffCap
	if retry < 6 {
		longest = min(backoffCap, backoffBase<<(retry-1))
	}
	return time.Duration(mathrand.Float64() * float64(longest))
}

func (m *Merchant) spend() bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.budget < retryCost {
		return false
	}
	m.budget -= retryCost
	return true
}

func (m *Merchant) earn() {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.budget = min(m.fullest, m.budget+1)
}
