package main

import (
	"encoding/base64"
	"encoding/json"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/client"
)

func TestFormat_ValueAndTemplates(t *testing.T) {
	defer func(real func() time.Time) { now = real }(now)
	now = func() time.Time { return time.Date(2026, 2, 3, 4, 5, 6, 7_000_000, time.UTC) }
	m := &client.Message{Topic: "t", Partition: 3, Sequence: 42, Key: []byte("key"), Value: []byte("v\x00\xff"), Attempt: 2, ProducerID: 9, ProducerSeq: 8}
	for _, c := range []struct{ format, want string }{
		{"value", "v\x00\xff\n"},
		{"%v", "v\x00\xff"},
		{`%p %s %k=%v\n`, "3 42 key=v\x00\xff\n"},
		{`%n/%a/%K/%V/%i/%q`, "t/2/3/3/9/8"},
		{`%t %T`, "2026-02-03T04:05:06.007Z 1770091506007"},
		{`100%%\t\r\0\\`, "100%\t\r\x00\\"},
		{`\n`, "\n"},
	} {
		f, err := parseFormat(c.format)
		if err != nil {
			t.Errorf("%s: %v", c.format, err)
			continue
		}
		if got := string(f([]byte("> "), m)); got != "> "+c.want {
			t.Errorf("%s prints %q, want %q", c.format, got, c.want)
		}
	}
}

func TestFormat_JSONKeepsEveryByte(t *testing.T) {
	f, err := parseFormat("json")
	if err != nil {
		t.Fatal(err)
	}
	line := f(nil, &client.Message{Topic: "t", Partition: 1, Sequence: 2, Key: []byte("k"), Value: []byte{0xff, 0}})
	var j map[string]any
	if err := json.Unmarshal(line, &j); err != nil {
		t.Fatal(err)
	}
	if j["key"] != "k" || j["value_base64"] != base64.StdEncoding.EncodeToString([]byte{0xff, 0}) || j["value"] != nil || j["sequence"] != 2.0 {
		t.Errorf("%s", line)
	}
}

func TestFormat_ValueAllocatesNothing(t *testing.T) {
	f, err := parseFormat(`%p %s %k=%v\n`)
	if err != nil {
		t.Fatal(err)
	}
	m := &client.Message{Key: []byte("key"), Value: []byte("value")}
	line := make([]byte, 0, 100)
	if n := testing.AllocsPerRun(100, func() { line = f(line[:0], m) }); n != 0 {
		t.Errorf("%v allocations per message", n)
	}
}
