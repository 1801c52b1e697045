package keyvault

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
)

// Sealed is a key string that only the holder of a recipient key can open, as webhooks and replies contain it.
type Sealed struct {
	Enc        string `json:"enc"`
	Ciphertext string `json:"ciphertext"`
}

// ErrSealed is returned for a text that was altered or sealed to another recipient key.
var ErrSealed = errors.New("keyvault: the sealed key cannot be opened with this private key")

// OpenSealed decrypts with the recipient's private key: 32 bytes of X25519 in base64url without padding.
//
// It is HPKE (RFC 9180) in base mode with DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM, empty info and aad.
func OpenSealed(privateKey Secret, sealed Sealed) (Secret, error) {
	private, err := decode(privateKey.Reveal())
	if err != nil {
		return "", ErrSealed
	}
	recipient, err := ecdh.X25519().NewPrivateKey(private)
	if err != nil {
		return "", ErrSealed
	}
	enc, errEnc := decode(sealed.Enc)
	ciphertext, errText := decode(sealed.Ciphertext)
	if errEnc != nil || errText != nil {
		return "", ErrSealed
	}
	ephemeral, err := ecdh.X25519().NewPublicKey(enc)
	if err != nil {
		return "", ErrSealed
	}
	shared, err := recipient.ECDH(ephemeral) // refuses points of low order
	if err != nil {
		return "", ErrSealed
	}
	text, err := openBase(shared, enc, recipient.PublicKey().Bytes(), ciphertext)
	if err != nil {
		return "", ErrSealed
	}
	return Secret(text), nil
}

var (
	kemSuite  = []byte{'K', 'E', 'M', 0x00, 0x20}                              // DHKEM(X25519, HKDF-SHA256)
	hpkeSuite = []byte{'H', 'P', 'K', 'E', 0x00, 0x20, 0x00, 0x01, 0x00, 0x02} // with HKDF-SHA256, AES-256-GCM
)

// openBase is RFC 9180: Decap (4.1), KeySchedule in base mode (5.1) and the first message (5.2).
func openBase(dh, enc, recipient, ciphertext []byte) ([]byte, error) {
	schedule := newLabeled(kemSuite)
	secret := schedule.expand(schedule.extract(nil, "eae_prk", dh), "shared_secret", append(append([]byte{}, enc...), recipient...), 32)

	schedule.suite = hpkeSuite
	context := []byte{0x00} // mode_base
	context = append(context, schedule.extract(nil, "psk_id_hash", nil)...)
	context = append(context, schedule.extract(nil, "info_hash", nil)...)
	prk := schedule.extract(secret, "secret", nil)
	key, nonce := schedule.expand(prk, "key", context, 32), schedule.expand(prk, "base_nonce", context, 12)
	if schedule.err != nil {
		return nil, schedule.err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	return aead.Open(nil, nonce, ciphertext, nil)
}

// labeled is LabeledExtract and LabeledExpand of RFC 9180, section 4. It keeps the first error.
type labeled struct {
	suite []byte
	err   error
}

func newLabeled(suite []byte) *labeled { return &labeled{suite: suite} }

func (l *labeled) extract(salt []byte, label string, material []byte) []byte {
	text := append(append([]byte("HPKE-v1"), l.suite...), label...)
	key, err := hkdf.Extract(sha256.New, append(text, material...), salt)
	l.note(err)
	return key
}

func (l *labeled) expand(prk []byte, label string, info []byte, length int) []byte {
	text := binary.BigEndian.AppendUint16(nil, uint16(length))
	text = append(append(append(text, "HPKE-v1"...), l.suite...), label...)
	key, err := hkdf.Expand(sha256.New, prk, string(append(text, info...)), length)
	l.note(err)
	return key
}

func (l *labeled) note(err error) {
	if l.err == nil {
		l.err = err
	}
}

func decode(text string) ([]byte, error) { return base64.RawURLEncoding.Strict().DecodeString(text) }
