// Package keyvault is the client of Keyvault for Go: a verifier and net/http middleware for backend services, and a
// client, webhook verification and sealed keys for merchants.
package keyvault

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"time"
)

// VerifierConfig configures a Verifier.
type VerifierConfig struct {
	// URL is the address of the service, such as https://keyvault.internal, or unix:///run/keyvault/verifier.sock.
	URL string
	// Environment is the environment of the keys that this service accepts.
	Environment Environment
	// ServiceToken is a service token with the permission keys:verify.
	ServiceToken Secret
	// Timeout is the deadline of a question; 2 seconds by default.
	Timeout time.Duration
	// Logger gets a warning for each question without a decision; slog.Default() by default.
	Logger *slog.Logger
}

// Verifier asks the service whether a request is allowed. It is safe for concurrent use and reuses connections.
type Verifier struct {
	url         string
	environment Environment
	token       func() Secret
	timeout     time.Duration
	logger      *slog.Logger
	client      *http.Client
}

// NewVerifier returns a verifier, or a *RefusedError for a configuration that would disclose the token.
func NewVerifier(config VerifierConfig) (*Verifier, error) {
	socket := ""
	if path, isSocket := strings.CutPrefix(config.URL, "unix://"); isSocket {
		if !strings.HasPrefix(path, "/") {
			return nil, refuse(RefusedBaseURL, "the socket's path is not absolute. Use unix:///path.")
		}
		socket, config.URL = path, "http://localhost"
	}
	base, err := parseBaseURL(config.URL)
	if err != nil {
		return nil, err
	}
	if err := checkEnvironment(config.Environment, base); err != nil {
		return nil, err
	}
	if kind, _ := config.ServiceToken.kindAndScope(); kind != "svc" {
		return nil, refuse(RefusedKey, "the service token is not one. A service token begins like kv_svc_.")
	}
	verifier := &Verifier{
		url:         base.JoinPath("/v1/keys/verify").String(),
		environment: config.Environment,
		token:       func() Secret { return config.ServiceToken },
		timeout:     config.Timeout,
		logger:      config.Logger,
		client:      newHTTPClient(socket),
	}
	if verifier.timeout <= 0 {
		verifier.timeout = 2 * time.Second
	}
	if verifier.logger == nil {
		verifier.logger = slog.Default()
	}
	return verifier, nil
}

// Question describes a request for an endpoint. Nil members are not sent, except Key, which is sent as null.
type Question struct {
	Key         *Secret
	Environment Environment
	// Endpoint is the endpoint's name in the catalog. Give it, or Method and Path.
	Endpoint string
	Method   string
	// Path is the path with the query, as received.
	Path string
	// Merchant and Store are the contexts that some endpoints require.
	Merchant, Store string
	CustomerToken   *Secret
	ClientIP        string
	Origin          *string
	UserAgent       string
	// Cost is the number of tokens to spend; 0 means 1.
	Cost int
}

func (q Question) encode() ([]byte, error) {
	reveal := func(secret *Secret) *string {
		if secret == nil {
			return nil
		}
		text := secret.Reveal()
		return &text
	}
	return json.Marshal(struct {
		Key           *string     `json:"key"`
		Environment   Environment `json:"environment"`
		Endpoint      string      `json:"endpoint,omitempty"`
		Method        string      `json:"method,omitempty"`
		Path          string      `json:"path,omitempty"`
		Merchant      string      `json:"merchant,omitempty"`
		Store         string      `json:"store,omitempty"`
		CustomerToken *string     `json:"customer_token,omitempty"`
		ClientIP      string      `json:"client_ip,omitempty"`
		Origin        *string     `json:"origin,omitempty"`
		UserAgent     string      `json:"user_agent,omitempty"`
		Cost          int         `json:"cost,omitempty"`
	}{
		reveal(q.Key), q.Environment, q.Endpoint, q.Method, q.Path, q.Merchant, q.Store, reveal(q.CustomerToken),
		q.ClientIP, q.Origin, q.UserAgent, q.Cost,
	})
}

// Identity is what the service proved about the caller of an allowed request.
type Identity struct {
	KeyID        string      `json:"key_id"`
	CredentialID string      `json:"credential_id"`
	Kind         string      `json:"kind"`
	MerchantID   string      `json:"merchant_id"`
	Environment  Environment `json:"environment"`
	// CustomerID is empty without a customer access token.
	CustomerID string `json:"customer_id"`
}

// Decision is the answer to give to the client. The zero value is a refusal.
type Decision struct {
	// Allowed is true only if Identity is complete.
	Allowed  bool
	Identity Identity
	// Status, Header and Body are the response to a refused request. Header also belongs to an allowed one.
	Status int
	Header http.Header
	Body   []byte
	// Code is the error code of a refusal.
	Code string
	// Cause says why there is no decision of the service; nil if there is one.
	Cause error
}

// Verify asks the service. It fails closed: without a complete decision before the deadline the answer is a 503.
func (v *Verifier) Verify(ctx context.Context, question Question) Decision {
	ctx, cancel := context.WithTimeout(ctx, v.timeout)
	defer cancel()
	question.Environment = v.environment
	reply, body, err := v.ask(ctx, question)
	if err != nil {
		return v.undecided(http.StatusServiceUnavailable, "1", err)
	}
	if reply.StatusCode == http.StatusOK {
		decision, err := v.read(body)
		if err != nil {
			return v.undecided(http.StatusServiceUnavailable, "1", err)
		}
		return decision
	}
	var problem struct{ Code string }
	_ = json.Unmarshal(body, &problem)
	err = fmt.Errorf("the service answered %d %s", reply.StatusCode, printable(problem.Code))
	// The question is well-formed, so these concern the client's method, path or headers.
	if problem.Code == "request_invalid" || problem.Code == "payload_too_large" {
		return v.undecided(http.StatusBadRequest, "", err)
	}
	retryAfter := reply.Header.Get("Retry-After")
	if reply.StatusCode != http.StatusServiceUnavailable || !wholeSeconds.MatchString(retryAfter) {
		retryAfter = "1"
	}
	return v.undecided(http.StatusServiceUnavailable, retryAfter, err)
}

var (
	wholeSeconds = regexp.MustCompile(`\A[0-9]{1,9}\z`)
	codeText     = regexp.MustCompile(`\A[a-z_]{1,64}\z`)
	headerName   = regexp.MustCompile(`\A[A-Za-z0-9-]{1,64}\z`)
	headerText   = regexp.MustCompile(`\A[\x20-\x7e]*\z`)
)

func printable(code string) string {
	if codeText.MatchString(code) {
		return code
	}
	return "without a code"
}

// maxHeaderValue bounds a header's value, in bytes.
const maxHeaderValue = 4096

func isHeaderValue(text string) bool {
	return len(text) <= maxHeaderValue && headerText.MatchString(text)
}

func (v *Verifier) ask(ctx context.Context, question Question) (*http.Response, []byte, error) {
	text, err := question.encode()
	if err != nil {
		return nil, nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, v.url, bytes.NewReader(text))
	if err != nil {
		return nil, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+v.token().Reveal())
	request.Header.Set("Content-Type", "application/json")
	return send(v.client, request)
}

// read returns the service's decision, or an error unless it is complete and consistent.
func (v *Verifier) read(body []byte) (Decision, error) {
	var found struct {
		Allowed   *bool
		Status    int
		Code      *string
		Headers   map[string]string
		Problem   json.RawMessage
		RequestID string `json:"request_id"`
		Identity
	}
	if err := json.Unmarshal(body, &found); err != nil {
		return Decision{}, errors.New("the decision is not readable")
	}
	decision := Decision{Status: found.Status, Header: http.Header{}}
	for name, value := range found.Headers {
		if !headerName.MatchString(name) || !isHeaderValue(value) {
			return Decision{}, errors.New("a header of the decision is not valid")
		}
		decision.Header.Set(name, value)
	}
	switch {
	case found.Allowed == nil:
		return Decision{}, errors.New("the reply is not a decision")
	case *found.Allowed:
		who := found.Identity
		if found.Status != http.StatusOK || who.Environment != v.environment || who.KeyID == "" ||
			who.CredentialID == "" || who.MerchantID == "" || (who.Kind != "private" && who.Kind != "public") {
			return Decision{}, errors.New("the decision is not complete")
		}
		decision.Allowed, decision.Identity = true, who
	default:
		var problem map[string]any
		if json.Unmarshal(found.Problem, &problem) != nil || problem == nil || found.Code == nil ||
			found.Status < 400 || found.Status > 599 {
			return Decision{}, errors.New("the refusal is not complete")
		}
		decision.Code, decision.Body = *found.Code, found.Problem
		decision.Header.Set("Content-Type", problemType)
		if found.RequestID != "" && isHeaderValue(found.RequestID) {
			decision.Header.Set("X-Request-Id", found.RequestID)
		}
	}
	return decision, nil
}

const problemType = "application/problem+json"

// undecided returns a refusal of our own: the client learns neither the cause nor anything about the service token.
func (v *Verifier) undecided(status int, retryAfter string, cause error) Decision {
	v.logger.Warn("keyvault: no decision", "cause", cause.Error())
	code, title, detail := "dependency_unavailable", "Dependency unavailable", "The request cannot be verified now. Try again."
	if status == http.StatusBadRequest {
		code, title = "request_invalid", "Request invalid"
		detail = "The method, the path or a header is invalid or too long."
	}
	body, _ := json.Marshal(map[string]any{
		"type": "urn:keyvault:problem:" + code, "title": title, "status": status, "code": code, "detail": detail,
	})
	decision := Decision{Status: status, Header: http.Header{}, Body: body, Code: code, Cause: cause}
	decision.Header.Set("Content-Type", problemType)
	decision.Header.Set("Cache-Control", "no-store")
	if retryAfter != "" {
		decision.Header.Set("Retry-After", retryAfter)
	}
	return decision
}
