package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/mortarmq/mortarmq/client"
)

// formatter appends the printed form of a message to dst.
type formatter func(dst []byte, m *client.Message) []byte

// parseFormat reads --format.
func parseFormat(s string) (formatter, error) {
	switch s {
	case "value":
		return formatValue, nil
	case "json":
		return formatJSON, nil
	}
	if !strings.ContainsAny(s, `%\`) {
		return nil, usagef("--format is %q: use value, json, or a template such as '%%p %%s %%k %%v\\n' (see 'mortarmq sub --help')", s)
	}
	return parseTemplate(s)
}

func formatValue(dst []byte, m *client.Message) []byte {
	return append(append(dst, m.Value...), '\n')
}

// messageJSON is a message as JSON.
type messageJSON struct {
	Topic       string `json:"topic"`
	Partition   uint16 `json:"partition"`
	Sequence    uint64 `json:"sequence"`
	Attempt     uint16 `json:"attempt"`
	Time        string `json:"time"`
	ProducerID  uint64 `json:"producer_id"`
	ProducerSeq uint64 `json:"producer_seq"`
	contentJSON
}

// contentJSON is a message's content as JSON. Bytes that are no UTF-8 come in base64 under another name.
type contentJSON struct {
	Key         *string `json:"key,omitempty"`
	KeyBase64   *string `json:"key_base64,omitempty"`
	Value       *string `json:"value,omitempty"`
	ValueBase64 *string `json:"value_base64,omitempty"`
}

func contentOf(key, value []byte) (c contentJSON) {
	c.Key, c.KeyBase64 = textOrBase64(key)
	c.Value, c.ValueBase64 = textOrBase64(value)
	return c
}

func formatJSON(dst []byte, m *client.Message) []byte {
	j := messageJSON{Topic: m.Topic, Partition: m.Partition, Sequence: m.Sequence, Attempt: m.Attempt,
		Time: now().Format(time.RFC3339Nano), ProducerID: m.ProducerID, ProducerSeq: m.ProducerSeq, contentJSON: contentOf(m.Key, m.Value)}
	b, err := json.Marshal(&j)
	if err != nil { // a struct of strings and numbers always has a JSON form
		panic(err)
	}
	return append(append(dst, b...), '\n')
}

func textOrBase64(b []byte) (text, encoded *string) {
	if utf8.Valid(b) {
		s := string(b)
		return &s, nil
	}
	s := base64.StdEncoding.EncodeToString(b)
	return nil, &s
}

// now is the time that messages are said to be received at; tests replace it.
var now = time.Now

// fields are the escapes of a template.
var fields = map[byte]formatter{
	'k': func(dst []byte, m *client.Message) []byte { return append(dst, m.Key...) },
	'K': func(dst []byte, m *client.Message) []byte { return strconv.AppendInt(dst, int64(len(m.Key)), 10) },
	'v': func(dst []byte, m *client.Message) []byte { return append(dst, m.Value...) },
	'V': func(dst []byte, m *client.Message) []byte { return strconv.AppendInt(dst, int64(len(m.Value)), 10) },
	'n': func(dst []byte, m *client.Message) []byte { return append(dst, m.Topic...) },
	'p': func(dst []byte, m *client.Message) []byte { return strconv.AppendUint(dst, uint64(m.Partition), 10) },
	's': func(dst []byte, m *client.Message) []byte { return strconv.AppendUint(dst, m.Sequence, 10) },
	'a': func(dst []byte, m *client.Message) []byte { return strconv.AppendUint(dst, uint64(m.Attempt), 10) },
	'i': func(dst []byte, m *client.Message) []byte { return strconv.AppendUint(dst, m.ProducerID, 10) },
	'q': func(dst []byte, m *client.Message) []byte { return strconv.AppendUint(dst, m.ProducerSeq, 10) },
	't': func(dst []byte, _ *client.Message) []byte { return now().AppendFormat(dst, time.RFC3339Nano) },
	'T': func(dst []byte, _ *client.Message) []byte { return strconv.AppendInt(dst, now().UnixMilli(), 10) },
}

var backslashes = map[byte]byte{'n': '\n', 't': '\t', 'r': '\r', '0': 0, '\\': '\\'}

// parseTemplate makes a formatter of literal text and escapes.
func parseTemplate(s string) (formatter, error) {
	var parts []formatter
	var text []byte
	endText := func() {
		if len(text) > 0 {
			literal := string(text)
			parts = append(parts, func(dst []byte, _ *client.Message) []byte { return append(dst, literal...) })
			text = text[:0]
		}
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c != '%' && c != '\\' {
			text = append(text, c)
			continue
		}
		if i++; i == len(s) {
			return nil, usagef("--format: the template ends with a single %q", c)
		}
		literal, known := backslashes[s[i]]
		if c == '%' {
			literal, known = '%', s[i] == '%'
		}
		field, isField := fields[s[i]]
		switch {
		case known:
			text = append(text, literal)
		case c == '%' && isField:
			endText()
			parts = append(parts, field)
		default:
			return nil, usagef("--format: %s is not known in a template (see 'mortarmq sub --help')", fmt.Sprintf("%c%c", c, s[i]))
		}
	}
	endText()
	return func(dst []byte, m *client.Message) []byte {
		for _, p := range parts {
			dst = p(dst, m)
		}
		return dst
	}, nil
}
