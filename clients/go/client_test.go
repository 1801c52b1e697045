package keyvault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func allowedReply() reply { return conformance.Verdicts[0].Reply }

func TestVerifierOverAUnixSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "verifier.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	keyvault := &service{replies: []reply{allowedReply()}}
	keyvault.Server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: keyvault}}
	keyvault.Start()
	defer keyvault.Close()
	verifier, err := NewVerifier(VerifierConfig{URL: "unix://" + socket, Environment: Sandbox, ServiceToken: conformance.Keys["service_token"]})
	if err != nil {
		t.Fatal(err)
	}
	key := conformance.Keys["private_sandbox"]
	decision := verifier.Verify(context.Background(), Question{Key: &key, Endpoint: "orders.create"})
	if !decision.Allowed || decision.Identity.MerchantID != "acme" {
		t.Fatalf("%+v", decision)
	}
}

func TestVerifierRefusesARelativeSocket(t *testing.T) {
	_, err := NewVerifier(VerifierConfig{URL: "unix://verifier.sock", Environment: Sandbox, ServiceToken: conformance.Keys["service_token"]})
	var refused *RefusedError
	if !errors.As(err, &refused) || refused.Refusal != RefusedBaseURL {
		t.Fatal(err)
	}
}

func TestEmptyBaseURLIsNamed(t *testing.T) {
	_, err := NewVerifier(VerifierConfig{Environment: Sandbox, ServiceToken: conformance.Keys["service_token"]})
	if err == nil || !strings.Contains(err.Error(), "the base URL is empty") {
		t.Fatal(err)
	}
}

func TestProtectWithOptions(t *testing.T) {
	for _, each := range []struct {
		name, forwarded string
		options         ProtectOptions
		want            map[string]any
	}{
		{"an endpoint", "", ProtectOptions{Endpoint: "orders.create"}, map[string]any{"endpoint": "orders.create", "method": nil, "path": nil}},
		{"no trusted proxy", "192.0.2.1", ProtectOptions{}, map[string]any{"client_ip": "127.0.0.1"}},
		{"a trusted proxy", "203.0.113.9, 192.0.2.1", ProtectOptions{TrustedProxies: 1}, map[string]any{"client_ip": "192.0.2.1"}},
		{"two trusted proxies", "203.0.113.9, 192.0.2.1", ProtectOptions{TrustedProxies: 2}, map[string]any{"client_ip": "203.0.113.9"}},
		{"fewer entries than proxies", "192.0.2.1", ProtectOptions{TrustedProxies: 2}, map[string]any{"client_ip": nil}},
		{"an entry that is no address", "unknown", ProtectOptions{TrustedProxies: 1}, map[string]any{"client_ip": nil}},
		{"an entry with a port", "[::ffff:192.0.2.1]:80", ProtectOptions{TrustedProxies: 1}, map[string]any{"client_ip": "192.0.2.1"}},
		{
			"a merchant", "", ProtectOptions{Question: func(r *http.Request, q *Question) { q.Merchant = r.Header.Get("X-Shop") }},
			map[string]any{"merchant": "acme"},
		},
	} {
		t.Run(each.name, func(t *testing.T) {
			keyvault := newService(t, "", allowedReply())
			verifier, err := NewVerifier(VerifierConfig{URL: keyvault.URL, Environment: Sandbox, ServiceToken: conformance.Keys["service_token"]})
			if err != nil {
				t.Fatal(err)
			}
			shop := httptest.NewServer(verifier.ProtectWith(each.options, http.NotFoundHandler()))
			defer shop.Close()
			request, _ := http.NewRequest("GET", shop.URL+"/x", nil)
			request.Header.Set("X-Forwarded-For", each.forwarded)
			request.Header.Set("X-Shop", "acme")
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			var asked map[string]any
			if err := json.Unmarshal(keyvault.got()[0].body, &asked); err != nil {
				t.Fatal(err)
			}
			for name, value := range each.want {
				if asked[name] != value {
					t.Errorf("%s is %v, expected %v", name, asked[name], value)
				}
			}
		})
	}
}

func TestIdentityOfARequestThatIsNotProtected(t *testing.T) {
	if _, found := IdentityOf(context.Background()); found {
		t.Fatal("an identity without a decision")
	}
}

func TestMerchantReadsTheKeyFileAgainAfterARefusal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	write := func(name string) {
		if err := os.WriteFile(path, []byte(conformance.Keys[name].Reveal()+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("private_sandbox")
	refused := reply{Status: 401, Headers: map[string]string{"Content-Type": problemType}, Body: json.RawMessage(`{"code": "key_revoked"}`)}
	found := reply{Status: 200, Headers: map[string]string{"Content-Type": "application/json"}, Body: json.RawMessage(`{}`)}
	keyvault := newService(t, "", found, refused, found)
	merchant, err := NewMerchant(MerchantConfig{BaseURL: keyvault.URL, Environment: Sandbox, Key: KeyFile(path)})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := merchant.Do(context.Background(), Request{Method: "GET", Path: "/x"}); err != nil {
			t.Fatal(err)
		}
		write("private_sandbox_2")
	}
	for number, name := range []string{"private_sandbox", "private_sandbox", "private_sandbox_2"} {
		if keyvault.got()[number].header.Get("X-Api-Key") != conformance.Keys[name].Reveal() {
			t.Errorf("request %d had another key than %s", number, name)
		}
	}
}

func TestMerchantEndsAtItsDeadline(t *testing.T) {
	keyvault := newService(t, "", reply{Fault: "silent"})
	merchant, err := NewMerchant(MerchantConfig{
		BaseURL: keyvault.URL, Environment: Sandbox, Key: StaticKey(conformance.Keys["private_sandbox"]), Deadline: 50 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = merchant.Do(context.Background(), Request{Method: "GET", Path: "/x"})
	var failed *Error
	if !errors.As(err, &failed) || failed.Status != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestSecretIsNeverPrinted(t *testing.T) {
	secret := conformance.Keys["private_sandbox"]
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", secret, "config", VerifierConfig{ServiceToken: secret})
	text, _ := json.Marshal(map[string]any{"secret": secret})
	question := Question{Key: &secret, CustomerToken: &secret}
	checkNoKey(t, fmt.Sprintf("%v %+v %#v %s %q %x %s %s %+v", secret, secret, secret, secret, secret, secret, text, log.String(), question))
	checkNoKey(t, fmt.Sprintf("%+v %#v", MerchantConfig{Key: StaticKey(secret)}, Request{CustomerToken: secret}))
}
