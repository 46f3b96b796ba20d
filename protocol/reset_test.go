package protocol

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"testing"
)

func TestResetResult_BytesAreThoseOfTheTable(t *testing.T) {
	m := ResetResult{DeclareResult: DeclareResult{TopicID: 0x0102, Partitions: 12, Existed: true},
		Positions: []ResetPosition{{Partition: 3, From: u1, To: u2}, {Partition: 4, From: 0, To: 1}}}
	const want = "00000031" + "09" + "02" + "0000002b" + "0102000c01" + "0002" + // frozen, written from the table of fields
		"0003" + "1112131415161718" + "2122232425262728" + "0004" + "0000000000000000" + "0000000000000001"
	frame := m.AppendOK(nil)
	if got := hex.EncodeToString(frame); got != want {
		t.Fatalf("encoded as\n%s\nwant\n%s", got, want)
	}
	_, payload, _, err := ParseFrame(frame)
	if err != nil {
		t.Fatal(err)
	}
	var ok OKFrame
	if err := ok.Decode(payload); err != nil {
		t.Fatal(err)
	}
	var back ResetResult
	if err := back.Decode(ok.Result); err != nil || !reflect.DeepEqual(back, m) {
		t.Fatalf("decoded %+v, %v", back, err)
	}
	for n := range ok.Result {
		if err := back.Decode(ok.Result[:n]); !errors.Is(err, CodeMalformedPayload) {
			t.Errorf("%d of %d bytes: %v", n, len(ok.Result), err)
		}
	}
	if err := back.Decode(append(bytes.Clone(ok.Result), 0)); !errors.Is(err, CodeMalformedPayload) {
		t.Errorf("a byte more: %v", err)
	}
}
