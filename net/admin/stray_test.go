package admin

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/protocol"
)

func TestServer_TellsAClientThatThisIsNotItsPort(t *testing.T) {
	s := New(Options{Addr: "127.0.0.1:0", Source: &fakeSource{}})
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Shutdown(t.Context()) }()
	conn, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	hello := protocol.Connect{Version: protocol.WireVersion, Token: []byte("secret")}
	if _, err := conn.Write(hello.AppendFrame(nil)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	op, payload, n, err := protocol.ParseFrame(answer)
	var refusal protocol.ErrFrame
	if err != nil || n != len(answer) || op != protocol.OpErr || refusal.Decode(payload) != nil {
		t.Fatalf("the answer is %q: %v", answer, err)
	}
	if refusal.RequestOp != protocol.OpConnect || !refusal.Code.Closes() || !strings.Contains(string(refusal.Message), "listen_client") {
		t.Errorf("the refusal is %v", refusal.Err())
	}

	resp, err := http.Get("http://" + s.Addr().String() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("HTTP gets %s", resp.Status)
	}
}
