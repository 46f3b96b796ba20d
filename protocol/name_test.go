package protocol

import (
	"errors"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestValidateTopic(t *testing.T) {
	for name, want := range map[string]string{
		"orders":                   "",
		"orders.eu.v1":             "",
		"Zürich.日本":                "",
		"a":                        "",
		"a$b":                      "",
		strings.Repeat("x", 255):   "",
		"":                         "empty",
		strings.Repeat("x", 256):   "256 bytes",
		"é" + string([]byte{0xff}): "UTF-8",
		".a":                       "empty token",
		"a.":                       "empty token",
		"a..b":                     "empty token",
		".":                        "empty token",
		"$sys":                     "reserved",
		"$":                        "reserved",
		"a.*":                      "wildcards",
		"a.>":                      "wildcards",
		"a#b":                      "wildcards",
		"a b":                      "space",
		"a\u00a0b":                 "space",
		"a\u2003b":                 "space",
		"a\tb":                     "control",
		"a\x00":                    "control",
		"a\x7f":                    "control",
		"a\u0085":                  "control",
	} {
		err := ValidateTopic([]byte(name))
		if want == "" {
			if err != nil {
				t.Errorf("%q: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, CodeInvalidTopic) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", name, err, want)
		}
		if err != nil && len(err.Error()) > MaxErrMessage+len(CodeInvalidTopic.Error()) {
			t.Errorf("%.20q: a text of %d bytes", name, len(err.Error()))
		}
	}
}

func TestValidateLookup_AllowsSystemTopics(t *testing.T) {
	for name, ok := range map[string]bool{
		"orders": true, "$dlq.billing": true, "$dlq.": false, "$dlq..a": false, "": false, "$a b": false, "$dlq.*": false,
	} {
		if err := ValidateLookup([]byte(name)); (err == nil) != ok || (err != nil && !errors.Is(err, CodeInvalidTopic)) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestValidateDelete_AllowsDeadLetterTopics(t *testing.T) {
	for _, name := range []string{"t", "$dlq.g", "$dlq.a.b"} {
		if err := ValidateDelete([]byte(name)); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", "$t", "$dlq", "$dlq.", "$dlq.a b", "$dlq.*", "$other.g"} {
		if err := ValidateDelete([]byte(name)); !errors.Is(err, CodeInvalidTopic) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestValidateGroup_LeavesRoomForTheDeadLetterTopic(t *testing.T) {
	longest := strings.Repeat("g", MaxGroupNameLen)
	if err := ValidateGroup([]byte(longest)); err != nil {
		t.Error(err)
	}
	if err := ValidateLookup([]byte(DLQPrefix + longest)); err != nil {
		t.Error(err)
	}
	for _, name := range []string{longest + "g", "", "$g", "a b", "a..b", "*"} {
		if err := ValidateGroup([]byte(name)); !errors.Is(err, CodeMalformedPayload) {
			t.Errorf("%.20q: %v", name, err)
		}
	}
}

func TestRoute_IsFNV1aModuloPartitions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		key := make([]byte, rng.IntN(40))
		for i := range key {
			key[i] = byte(rng.Uint32())
		}
		partitions := uint16(1 + rng.IntN(65535))
		h := fnv.New32a()
		h.Write(key)
		if got, want := Route(key, partitions), uint16(h.Sum32()%uint32(partitions)); got != want {
			t.Fatalf("Route(% x, %d) = %d, want %d", key, partitions, got, want)
		}
	}
	// Frozen: a change would send keys to other partitions than before.
	for key, want := range map[string]uint16{"": 1, "a": 4, "order-1": 1} {
		if got := Route([]byte(key), 12); got != want {
			t.Errorf("Route(%q, 12) = %d, want %d", key, got, want)
		}
	}
}
