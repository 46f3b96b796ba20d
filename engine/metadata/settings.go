package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/mortarmq/mortarmq/protocol"
)

// TopicSettings are what DECLARE may set beside the partition count. The zero value stands for the defaults.
type TopicSettings struct {
	// Durability is what a publish gets that does not ask for one; DurabilityTopic (0) means quorum.
	Durability protocol.Durability
}

// topicSettingsJSON is the JSON form; keys are sorted, defaults left out, so that the encoding is canonical.
type topicSettingsJSON struct {
	Durability string `json:"durability,omitempty"`
}

// ParseTopicSettings reads the JSON object of a DECLARE's settings tail. Unknown keys are refused. The error wraps
// protocol.CodeInvalidTopic.
func ParseTopicSettings(b []byte) (TopicSettings, error) {
	var s TopicSettings
	var j topicSettingsJSON
	if err := parseObject(b, &j, "durability"); err != nil {
		return s, fmt.Errorf("topic settings: %w: %w", err, protocol.CodeInvalidTopic)
	}
	switch j.Durability {
	case "":
	case "memory":
		s.Durability = protocol.DurabilityMemory
	case "local":
		s.Durability = protocol.DurabilityLocal
	case "quorum":
		// The default has one representation only, or equal settings would compare as different.
	default:
		return s, fmt.Errorf("topic settings: durability is %q: use memory, local or quorum: %w", j.Durability, protocol.CodeInvalidTopic)
	}
	return s, nil
}

// EffectiveDurability is the durability that applies, never DurabilityTopic.
func (s TopicSettings) EffectiveDurability() protocol.Durability {
	if s.Durability == protocol.DurabilityTopic {
		return protocol.DurabilityQuorum
	}
	return s.Durability
}

// AppendJSON appends the canonical JSON form.
func (s TopicSettings) AppendJSON(dst []byte) []byte {
	switch s.Durability {
	case protocol.DurabilityMemory:
		return append(dst, `{"durability":"memory"}`...)
	case protocol.DurabilityLocal:
		return append(dst, `{"durability":"local"}`...)
	case protocol.DurabilityTopic, protocol.DurabilityQuorum:
		return append(dst, `{}`...)
	default:
		return append(dst, `{}`...)
	}
}

// parseObject decodes one JSON object into v, knowing the keys given (exactly: encoding/json alone would ignore case).
func parseObject(b []byte, v any, known ...string) error {
	var raw map[string]json.RawMessage
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&raw); err != nil {
		return fmt.Errorf("not a JSON object: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON object")
	}
	if raw == nil {
		return errors.New("not a JSON object: null")
	}
	var unknown []string
	for key := range raw {
		if !slices.Contains(known, key) {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return fmt.Errorf("unknown key: %s (known: %s)", strings.Join(unknown, ", "), strings.Join(known, ", "))
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("a value has the wrong type: %w", err)
	}
	return nil
}
