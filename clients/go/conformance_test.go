package keyvault

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

type reply struct {
	Status  int
	Headers map[string]string
	Body    json.RawMessage
	Text    string
	Fault   string
}

type expectation struct {
	Allowed       bool
	Status        int
	Headers       map[string]string
	AbsentHeaders []string `json:"absent_headers"`
	Problem       map[string]any
	Identity      *struct {
		Identity
		CustomerID *string `json:"customer_id"`
	}
	Attempts        int
	Waits           []struct{ AtLeast, AtMost float64 }
	JSON            json.RawMessage
	Error           map[string]any
	Authorization   string
	RequestsToOther *int `json:"requests_to_other"`
}

var conformance struct {
	Keys     map[string]Secret
	Verdicts []struct {
		Name     string
		Incoming struct {
			Method, Path string
			Headers      [][2]string
		}
		Asked           map[string]any
		Reply           reply
		Expect          expectation
		DeadlineSeconds float64 `json:"deadline_seconds"`
	}
	Requests []struct {
		Name   string
		Client struct {
			BasePath        string `json:"base_path"`
			Environment     Environment
			Keys            []string
			MaxAttempts     int     `json:"max_attempts"`
			RetryBudget     int     `json:"retry_budget"`
			DeadlineSeconds float64 `json:"deadline_seconds"`
		}
		Calls []struct {
			Method, Path   string
			Body           string
			Replies        []reply
			IdempotencyKey string `json:"idempotency_key"`
			CustomerToken  string `json:"customer_token"`
			Expect         expectation
		}
	}
	Refusals []struct {
		Name, Client   string
		BaseURL        string `json:"base_url"`
		Environment    Environment
		Key            string
		KeyText        Secret `json:"key_text"`
		CustomerToken  string `json:"customer_token"`
		IdempotencyKey string `json:"idempotency_key"`
		Method, Path   string
		Refusal        Refusal
	}
	Webhooks []struct {
		Name    string
		Secrets []Secret
		Headers map[string]string
		Body    string
		Now     int64
		Expect  struct{ ID, Error string }
	}
	Sealed []struct {
		Name       string
		PrivateKey Secret `json:"private_key"`
		Sealed     Sealed
		Expect     struct{ Text, Error string }
	}
}

func TestMain(m *testing.M) {
	text, err := os.ReadFile("../conformance.json")
	if err == nil {
		err = json.Unmarshal(bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("at_least"), []byte("AtLeast")), []byte("at_most"), []byte("AtMost")), &conformance)
	}
	if err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// received is a request that the service got.
type received struct {
	method, path string
	header       http.Header
	body         []byte
}

// service answers with the replies, one after the other, and records what it gets.
type service struct {
	*httptest.Server
	mutex    sync.Mutex
	replies  []reply
	received []received
	other    string
}

func newService(t *testing.T, other string, replies ...reply) *service {
	t.Helper()
	found := &service{replies: replies, other: other}
	found.Server = httptest.NewServer(found)
	t.Cleanup(func() {
		found.CloseClientConnections()
		found.Close()
	})
	return found
}

func (s *service) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	body, _ := io.ReadAll(request.Body)
	s.mutex.Lock()
	s.received = append(s.received, received{request.Method, request.RequestURI, request.Header, body})
	answer := reply{Status: 599}
	if len(s.replies) > 0 {
		answer, s.replies = s.replies[0], s.replies[1:]
	}
	s.mutex.Unlock()
	text := []byte(answer.Text)
	if answer.Body != nil {
		text = answer.Body
	}
	for name, value := range answer.Headers {
		response.Header().Set(name, strings.NewReplacer("{self}", s.URL, "{other}", s.other).Replace(value))
	}
	switch answer.Fault {
	case "":
		response.WriteHeader(answer.Status)
		_, _ = response.Write(text)
	case "silent":
		<-request.Context().Done()
	case "cut":
		panic(http.ErrAbortHandler)
	case "cut_body", "slow_body":
		response.Header().Set("Content-Type", "application/json")
		response.Header().Set("Content-Length", fmt.Sprint(len(text)))
		response.WriteHeader(answer.Status)
		_, _ = response.Write(text[:len(text)/2])
		response.(http.Flusher).Flush()
		if answer.Fault == "slow_body" {
			<-request.Context().Done()
		}
		panic(http.ErrAbortHandler)
	default:
		panic("unknown fault " + answer.Fault)
	}
}

// begin sets the replies of the next call and forgets what was received.
func (s *service) begin(replies []reply) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.received, s.replies = nil, replies
}

// got returns what was received.
func (s *service) got() []received {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.received
}

// otherHost returns a service whose host name differs from that of newService.
func otherHost(t *testing.T) *service {
	t.Helper()
	other := newService(t, "")
	other.URL = strings.Replace(other.URL, "127.0.0.1", "localhost", 1)
	return other
}

func TestConformanceVerdicts(t *testing.T) {
	for _, each := range conformance.Verdicts {
		t.Run(each.Name, func(t *testing.T) {
			other := otherHost(t)
			keyvault := newService(t, other.URL, each.Reply)
			if each.Reply.Fault == "refuse" {
				keyvault.Listener.Close()
			}
			var log bytes.Buffer
			verifier, err := NewVerifier(VerifierConfig{
				URL: keyvault.URL, Environment: Sandbox, ServiceToken: conformance.Keys["service_token"],
				Timeout: time.Duration(each.DeadlineSeconds * float64(time.Second)), Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			var identity *Identity
			shop := httptest.NewServer(verifier.Protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				found, _ := IdentityOf(r.Context())
				identity = &found
				w.WriteHeader(207)
			})))
			defer shop.Close()
			answer := sendRaw(t, shop.Listener.Addr().String(), each.Incoming.Method, each.Incoming.Path, each.Incoming.Headers)

			if each.Reply.Fault != "refuse" {
				got := keyvault.got()
				if len(got) != 1 {
					t.Fatalf("asked %d times", len(got))
				}
				question := got[0]
				var asked map[string]any
				if err := json.Unmarshal(question.body, &asked); err != nil || !reflect.DeepEqual(asked, each.Asked) {
					t.Errorf("asked %s, expected %v", question.body, each.Asked)
				}
				if question.method != "POST" || question.path != "/v1/keys/verify" ||
					question.header.Get("Authorization") != "Bearer "+conformance.Keys["service_token"].Reveal() {
					t.Errorf("asked with %s %s", question.method, question.path)
				}
			}
			if len(other.got()) != 0 {
				t.Error("another host was asked")
			}
			checkAnswer(t, answer, identity, each.Expect)
			checkNoKey(t, fmt.Sprintf("%+v %#v %s", verifier, verifier, &log))
			if each.Reply.Fault != "" && log.Len() == 0 {
				t.Error("nothing was logged")
			}
		})
	}
}

type answer struct {
	*http.Response
	body []byte
}

// sendRaw sends the path and repeated headers unchanged.
func sendRaw(t *testing.T, address, method, path string, headers [][2]string) answer {
	t.Helper()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	fmt.Fprintf(connection, "%s %s HTTP/1.1\r\nHost: shop.example\r\nConnection: close\r\nContent-Length: 0\r\n", method, path)
	for _, header := range headers {
		fmt.Fprintf(connection, "%s: %s\r\n", header[0], header[1])
	}
	fmt.Fprint(connection, "\r\n")
	text, err := io.ReadAll(connection)
	if err != nil {
		t.Fatal(err)
	}
	return readAnswer(t, text)
}

func checkAnswer(t *testing.T, answer answer, identity *Identity, expect expectation) {
	t.Helper()
	if (identity != nil) != expect.Allowed || (answer.StatusCode == 207) != expect.Allowed {
		t.Fatalf("allowed %v with status %d", identity != nil, answer.StatusCode)
	}
	for name, value := range expect.Headers {
		if got := answer.Header.Values(name); len(got) != 1 || got[0] != value {
			t.Errorf("%s is %q, expected %q", name, got, value)
		}
	}
	for _, name := range expect.AbsentHeaders {
		if got := answer.Header.Values(name); len(got) != 0 {
			t.Errorf("%s is %q", name, got)
		}
	}
	if expect.Allowed {
		wanted := expect.Identity.Identity
		if expect.Identity.CustomerID != nil {
			wanted.CustomerID = *expect.Identity.CustomerID
		}
		if *identity != wanted {
			t.Errorf("identity %+v, expected %+v", *identity, wanted)
		}
		return
	}
	var problem map[string]any
	if err := json.Unmarshal(answer.body, &problem); err != nil {
		t.Fatal(err)
	}
	for name, value := range expect.Problem {
		if !reflect.DeepEqual(problem[name], value) {
			t.Errorf("problem's %s is %v, expected %v", name, problem[name], value)
		}
	}
	if answer.StatusCode != expect.Status {
		t.Errorf("status %d, expected %d", answer.StatusCode, expect.Status)
	}
}

func checkNoKey(t *testing.T, text string) {
	t.Helper()
	for name, key := range conformance.Keys {
		if strings.Contains(text, key.Reveal()[27:]) {
			t.Errorf("the text contains %s", name)
		}
	}
}

func TestConformanceRequests(t *testing.T) {
	for _, each := range conformance.Requests {
		t.Run(each.Name, func(t *testing.T) {
			other := otherHost(t)
			keyvault := newService(t, other.URL)
			loads := 0
			merchant, err := NewMerchant(MerchantConfig{
				BaseURL: keyvault.URL + each.Client.BasePath, Environment: each.Client.Environment,
				MaxAttempts: each.Client.MaxAttempts, RetryBudget: each.Client.RetryBudget,
				Deadline: time.Duration(each.Client.DeadlineSeconds * float64(time.Second)),
				Key: func(context.Context) (Secret, error) {
					name := each.Client.Keys[min(loads, len(each.Client.Keys)-1)]
					loads++
					return conformance.Keys[name], nil
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			var waits []float64
			merchant.sleep = func(_ context.Context, wait time.Duration) error {
				waits = append(waits, wait.Seconds())
				return nil
			}
			idempotencyKeys := map[string]bool{}
			for _, call := range each.Calls {
				waits = nil
				keyvault.begin(call.Replies)
				response, err := merchant.Do(context.Background(), Request{
					Method: call.Method, Path: call.Path, Body: []byte(call.Body), IdempotencyKey: call.IdempotencyKey,
					CustomerToken: conformance.Keys[call.CustomerToken],
				})
				checkResult(t, response, err, call.Expect)
				checkNoKey(t, fmt.Sprintf("%+v %#v %v", merchant, merchant, err))
				got := keyvault.got()
				if len(got) != call.Expect.Attempts {
					t.Fatalf("%d attempts, expected %d", len(got), call.Expect.Attempts)
				}
				if len(waits) != len(call.Expect.Waits) {
					t.Fatalf("waits %v, expected %v", waits, call.Expect.Waits)
				}
				for number, wait := range call.Expect.Waits {
					if waits[number] < wait.AtLeast || waits[number] > wait.AtMost {
						t.Errorf("waited %v, expected %v", waits[number], wait)
					}
				}
				first := got[0]
				key := first.header.Get("Idempotency-Key")
				if (key != "") != (call.Method == "POST") || (key != "" && idempotencyKeys[key]) || (call.IdempotencyKey != "" && key != call.IdempotencyKey) {
					t.Errorf("Idempotency-Key %q", key)
				}
				idempotencyKeys[key] = true
				for number, attempt := range got {
					if attempt.method != call.Method || attempt.path != each.Client.BasePath+call.Path ||
						string(attempt.body) != call.Body || attempt.header.Get("Idempotency-Key") != key {
						t.Errorf("attempt %d: %s %s %q", number, attempt.method, attempt.path, attempt.body)
					}
					wanted := conformance.Keys[each.Client.Keys[min(number, len(each.Client.Keys)-1)]]
					if attempt.header.Get("X-Api-Key") != wanted.Reveal() {
						t.Errorf("attempt %d has another key", number)
					}
					bearer := strings.ReplaceAll(call.Expect.Authorization, "{customer_token}", conformance.Keys["customer_token"].Reveal())
					if attempt.header.Get("Authorization") != bearer {
						t.Errorf("attempt %d has another Authorization", number)
					}
				}
				if len(other.got()) != 0 {
					t.Error("another host got a request")
				}
			}
		})
	}
}

func checkResult(t *testing.T, response *Response, err error, expect expectation) {
	t.Helper()
	if expect.Error == nil {
		if err != nil {
			t.Fatal(err)
		}
		var got, wanted any
		_ = json.Unmarshal(response.Body, &got)
		_ = json.Unmarshal(expect.JSON, &wanted)
		if response.Status != expect.Status || !reflect.DeepEqual(got, wanted) {
			t.Errorf("%d %s", response.Status, response.Body)
		}
		return
	}
	var failed *Error
	if !errors.As(err, &failed) {
		t.Fatalf("got %v, expected an *Error", err)
	}
	if !headerText.MatchString(err.Error()) {
		t.Errorf("the error's text is %q", err)
	}
	got := map[string]any{
		"status": failed.Status, "code": failed.Code, "check": failed.Check, "request_id": failed.RequestID,
		"retry_after_seconds": int(failed.RetryAfter.Seconds()),
	}
	for name, value := range expect.Error {
		switch value := value.(type) {
		case nil:
			if !reflect.ValueOf(got[name]).IsZero() {
				t.Errorf("%s is %v", name, got[name])
			}
		case float64:
			if got[name] != int(value) {
				t.Errorf("%s is %v, expected %v", name, got[name], value)
			}
		default:
			if got[name] != value {
				t.Errorf("%s is %v, expected %v", name, got[name], value)
			}
		}
	}
}

func TestConformanceRefusals(t *testing.T) {
	for _, each := range conformance.Refusals {
		t.Run(each.Name, func(t *testing.T) {
			key := conformance.Keys[each.Key]
			if each.KeyText != "" {
				key = each.KeyText
			}
			var err error
			if each.Client == "verifier" {
				_, err = NewVerifier(VerifierConfig{URL: each.BaseURL, Environment: each.Environment, ServiceToken: key})
			} else {
				err = callRefused(each.BaseURL, each.Environment, key, Request{
					Method: each.Method, Path: each.Path, Body: []byte("{}"), IdempotencyKey: each.IdempotencyKey,
					CustomerToken: conformance.Keys[each.CustomerToken],
				})
			}
			var refused *RefusedError
			if !errors.As(err, &refused) || refused.Refusal != each.Refusal {
				t.Fatalf("got %v, expected a refusal of %s", err, each.Refusal)
			}
			checkNoKey(t, fmt.Sprintf("%+v %#v", err, err))
		})
	}
}

func callRefused(baseURL string, environment Environment, key Secret, request Request) error {
	merchant, err := NewMerchant(MerchantConfig{BaseURL: baseURL, Environment: environment, Key: StaticKey(key)})
	if err != nil {
		return err
	}
	merchant.client.Transport = roundTripper(func(*http.Request) (*http.Response, error) { panic("a request was sent") })
	_, err = merchant.Do(context.Background(), request)
	return err
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

func TestConformanceWebhooks(t *testing.T) {
	errs := map[string]error{"": nil, "signature": ErrWebhookSignature, "secret": ErrWebhookSecret}
	for _, each := range conformance.Webhooks {
		t.Run(each.Name, func(t *testing.T) {
			header := http.Header{}
			for name, value := range each.Headers {
				header.Set(name, value)
			}
			id, err := verifyWebhook(header, []byte(each.Body), time.Unix(each.Now, 0), each.Secrets)
			if id != each.Expect.ID || err != errs[each.Expect.Error] {
				t.Fatalf("got %q, %v", id, err)
			}
		})
	}
}

func TestConformanceSealed(t *testing.T) {
	for _, each := range conformance.Sealed {
		t.Run(each.Name, func(t *testing.T) {
			text, err := OpenSealed(each.PrivateKey, each.Sealed)
			if text.Reveal() != each.Expect.Text || (err != nil) != (each.Expect.Error != "") {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func readAnswer(t *testing.T, text []byte) answer {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(text)), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response, body}
}
