package protocol

import (
	"bytes"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// DLQPrefix, followed by a group's name, is the name of the group's dead-letter topic.
const DLQPrefix = "$dlq."

// MaxGroupNameLen is the longest group name that ValidateGroup accepts: shorter than the wire's MaxGroupLen, so that
// the name of the group's dead-letter topic is a topic name too.
const MaxGroupNameLen = MaxTopicLen - len(DLQPrefix)

// Route returns the partition of a key: FNV-1a (32 bit) modulo partitions. partitions must not be 0. An empty key has
// no route of its own; the sender spreads those.
func Route(key []byte, partitions uint16) uint16 {
	const offset, prime = 2166136261, 16777619
	h := uint32(offset)
	for _, c := range key {
		h = (h ^ uint32(c)) * prime
	}
	return uint16(h % uint32(partitions))
}

// ValidateTopic checks a topic name that a client wants to create or publish to. The error wraps
// CodeInvalidTopic and says what is wrong.
func ValidateTopic(name []byte) error {
	if len(name) > 0 && name[0] == '$' {
		return invalidTopic(name, "starts with '$', which is reserved for system topics")
	}
	if reason := nameProblem(name, MaxTopicLen); reason != "" {
		return invalidTopic(name, reason)
	}
	return nil
}

// ValidateLookup checks a topic name that is only looked up or read: besides what ValidateTopic allows, a system topic
// such as "$dlq.billing".
func ValidateLookup(name []byte) error {
	if reason := nameProblem(name, MaxTopicLen); reason != "" {
		return invalidTopic(name, reason)
	}
	return nil
}

// ValidateDelete checks the name of a topic that a client wants to delete: besides what ValidateTopic allows, that of a
// dead-letter topic.
func ValidateDelete(name []byte) error {
	if bytes.HasPrefix(name, []byte(DLQPrefix)) {
		return ValidateLookup(name)
	}
	return ValidateTopic(name)
}

// ValidateGroup checks a group name: a topic name's rules, at most MaxGroupNameLen bytes. There is no code of its own
// for it; the error wraps CodeMalformedPayload.
func ValidateGroup(name []byte) error {
	reason := ""
	if len(name) > 0 && name[0] == '$' {
		reason = "starts with '$', which is reserved"
	} else {
		reason = nameProblem(name, MaxGroupNameLen)
	}
	if reason != "" {
		return fmt.Errorf("group name %s %s: %w", quoteName(name), reason, CodeMalformedPayload)
	}
	return nil
}

func invalidTopic(name []byte, reason string) error {
	return fmt.Errorf("topic name %s %s: %w", quoteName(name), reason, CodeInvalidTopic)
}

// quoteName quotes a name for an error text that has to fit MaxErrMessage.
func quoteName(name []byte) string {
	const most = 64
	if len(name) > most {
		return fmt.Sprintf("%q...", name[:most])
	}
	return fmt.Sprintf("%q", name)
}

// nameProblem says what is wrong with a name of tokens, "" if nothing.
func nameProblem(name []byte, limit int) string {
	switch {
	case len(name) == 0:
		return "is empty"
	case len(name) > limit:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(name), limit)
	case !utf8.Valid(name):
		return "is not valid UTF-8"
	case name[0] == '.', name[len(name)-1] == '.', bytes.Contains(name, []byte("..")):
		return "has an empty token: '.' stands between tokens only"
	}
	for at, c := range string(name) {
		switch {
		case c == '*', c == '>', c == '#':
			return fmt.Sprintf("has %q at byte %d: wildcards are not supported", c, at)
		case unicode.IsControl(c):
			return fmt.Sprintf("has the control character %U at byte %d", c, at)
		case unicode.IsSpace(c), unicode.Is(unicode.Z, c):
			return fmt.Sprintf("has the space %U at byte %d", c, at)
		}
	}
	return ""
}
