package deadletter

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/mortarmq/mortarmq/protocol"
)

func sample() Envelope {
	return Envelope{
		TopicID: 7, Partition: 3, Sequence: 0x0102030405060708, Topic: []byte("orders.eu"),
		ProducerID: 0x1112131415161718, ProducerSeq: 42, Attempts: 5, Reason: ReasonExpired, Flags: FlagTombstone,
		PublishedMs: 1_700_000_000_000, EndedMs: 1_700_000_031_500,
	}
}

func TestEnvelope_BytesAreThoseOfTheFormat(t *testing.T) {
	want, err := os.ReadFile("testdata/envelope-v1.hex") // frozen: never regenerated
	if err != nil {
		t.Fatal(err)
	}
	e := sample()
	got := append(e.AppendHeader(nil), "value"...)
	if text := hex.EncodeToString(got); text != strings.TrimSpace(string(want)) {
		t.Fatalf("encoded as\n%s\nwant\n%s", text, want)
	}
	var back Envelope
	value, err := back.Decode(got)
	if err != nil || string(value) != "value" {
		t.Fatalf("decoded value %q, %v", value, err)
	}
	if !bytes.Equal(back.AppendHeader(nil), e.AppendHeader(nil)) {
		t.Fatalf("decoded %+v, want %+v", back, e)
	}
}

func TestEnvelope_LongestHeaderKeepsTheLimit(t *testing.T) {
	e := sample()
	e.Topic = bytes.Repeat([]byte("t"), protocol.MaxTopicLen)
	b := e.AppendHeader(nil)
	if len(b) != e.HeaderLen() || len(b) > MaxHeaderLen || len(b)+protocol.MaxValueLen > protocol.MaxMsgValueLen {
		t.Fatalf("%d bytes, HeaderLen says %d", len(b), e.HeaderLen())
	}
	if _, err := e.Decode(b); err != nil {
		t.Fatal(err)
	}
}

func TestEnvelope_DecodeRefusesWhatTheFormatDoesNotAllow(t *testing.T) {
	for name, damage := range map[string]func(b []byte) []byte{
		"nothing":              func([]byte) []byte { return nil },
		"half a header":        func(b []byte) []byte { return b[:fixedLen-1] },
		"half a name":          func(b []byte) []byte { return b[:fixedLen+2] },
		"another magic":        func(b []byte) []byte { b[0] = 'X'; return b },
		"a version to come":    func(b []byte) []byte { b[4] = 2; return b },
		"no reason":            func(b []byte) []byte { b[5] = 0; return b },
		"an unknown reason":    func(b []byte) []byte { b[5] = 5; return b },
		"no attempts":          func(b []byte) []byte { b[6], b[7] = 0, 0; return b },
		"a short header_len":   func(b []byte) []byte { b[9] = fixedLen - 1; return b },
		"no name":              func(b []byte) []byte { b[9] = fixedLen; return b },
		"a long header_len":    func(b []byte) []byte { b[8] = 3; return b },
		"topic id 0":           func(b []byte) []byte { b[10], b[11] = 0, 0; return b },
		"partition 0xFFFF":     func(b []byte) []byte { b[12], b[13] = 0xFF, 0xFF; return b },
		"an unknown flag":      func(b []byte) []byte { b[15] |= 1; return b },
		"sequence 0":           func(b []byte) []byte { clear(b[16:24]); return b },
		"a negative sequence":  func(b []byte) []byte { b[16] |= 0x80; return b },
		"a space in the name":  func(b []byte) []byte { b[fixedLen] = ' '; return b },
		"a name without UTF-8": func(b []byte) []byte { b[fixedLen] = 0xFF; return b },
	} {
		e := sample()
		var got Envelope
		if _, err := got.Decode(damage(e.AppendHeader(nil))); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReason_NamesReadBack(t *testing.T) {
	for r := ReasonNack; r <= ReasonRejected; r++ {
		if got, err := ParseReason(r.String()); err != nil || got != r {
			t.Errorf("%v: %v, %v", r, got, err)
		}
	}
	for _, name := range []string{"", "NACK", "reason 5"} {
		if _, err := ParseReason(name); err == nil {
			t.Errorf("%q is taken for a reason", name)
		}
	}
	if s := Reason(9).String(); s != "reason 9" {
		t.Error(s)
	}
}

// FuzzEnvelope: no panic; what decodes encodes to the same bytes.
func FuzzEnvelope(f *testing.F) {
	e := sample()
	f.Add(append(e.AppendHeader(nil), "value"...))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		var e Envelope
		value, err := e.Decode(b)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("%v does not match ErrFormat", err)
			}
			return
		}
		if again := append(e.AppendHeader(nil), value...); !bytes.Equal(again, b) {
			t.Fatalf("%x became %x", b, again)
		}
	})
}
