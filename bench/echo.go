package bench

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/panjf2000/gnet/v2"
	"github.com/panjf2000/gnet/v2/pkg/logging"
)

// EchoArg as the first command line argument makes the program an echo server: the benchmark starts itself that way, so
// that the server is a process of its own as the broker is.
const EchoArg = "echo-server"

// echoReady starts the line in which the server gives its address; gnet's log may stand before it.
const echoReady = "echo server on "

// echoServer answers every read with the same bytes.
type echoServer struct {
	gnet.BuiltinEventEngine
	addr string
}

// OnBoot tells the parent that the server listens.
func (s *echoServer) OnBoot(gnet.Engine) gnet.Action {
	fmt.Println(echoReady + s.addr)
	return gnet.None
}

// OnTraffic implements gnet.EventHandler.
func (s *echoServer) OnTraffic(c gnet.Conn) gnet.Action {
	b, err := c.Next(-1)
	if err != nil {
		return gnet.Close
	}
	if _, err := c.Write(b); err != nil {
		return gnet.Close
	}
	return gnet.None
}

// RunEchoServer serves until the process is killed, and prints its address when it listens. kind is "gnet" or "go".
func RunEchoServer(kind string) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addr := ln.Addr().String()
	if kind != "gnet" {
		fmt.Println(echoReady + addr)
		return plainEcho(ln)
	}
	ln.Close() // gnet opens its own; the port stays free for the moment between
	return gnet.Run(&echoServer{addr: addr}, "tcp://"+addr, gnet.WithTCPNoDelay(gnet.TCPNoDelay), gnet.WithReuseAddr(true), gnet.WithLogLevel(logging.ErrorLevel))
}

// plainEcho is the echo server as one writes it in Go without a library: a goroutine per connection.
func plainEcho(ln net.Listener) error {
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			buf := make([]byte, readBufferBytes)
			for {
				n, err := c.Read(buf)
				if err != nil {
					return // the other side is done
				}
				if _, err := c.Write(buf[:n]); err != nil {
					return
				}
			}
		}()
	}
}

// startEcho starts this program as an echo server.
func startEcho(ctx context.Context, kind string) (addr string, stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return "", nil, err
	}
	cmd := exec.CommandContext(ctx, self, EchoArg, kind)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		// It may have ended already, and that it was killed is no news.
		_, _ = cmd.Process.Kill(), cmd.Wait()
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if addr, ok := strings.CutPrefix(lines.Text(), echoReady); ok {
			return addr, stop, nil
		}
	}
	stop()
	return "", nil, fmt.Errorf("the echo server did not start: %w", cmp.Or(lines.Err(), io.ErrUnexpectedEOF))
}

// echoLatency measures request and answer of size bytes with one outstanding.
func echoLatency(ctx context.Context, addr string, size int, d time.Duration) (*Quantiles, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	frame, answer := randomBytes(2, size), make([]byte, size)
	h := newHist()
	for began := now(); h.TotalCount() == 0 || now()-began < int64(d); {
		t := now()
		if _, err := conn.Write(frame); err != nil {
			return nil, fmt.Errorf("echo: %w", err)
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			return nil, fmt.Errorf("echo: %w", err)
		}
		record(h, now()-t)
	}
	return quantiles(h), nil
}

// echoRate measures requests per second of size bytes with a pipelined window of them outstanding.
func echoRate(ctx context.Context, addr string, size int, d time.Duration) (float64, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	// At most writeBatchBytes are on their way: writing more before reading could fill both directions.
	window := max(1, min(pipelineWindow, writeBatchBytes/size))
	frames, answer := randomBytes(2, size*window), make([]byte, size*window)
	began, bytes := now(), 0
	for bytes == 0 || now()-began < int64(d) {
		if _, err := conn.Write(frames); err != nil {
			return 0, fmt.Errorf("echo: %w", err)
		}
		if _, err := io.ReadFull(conn, answer); err != nil {
			return 0, fmt.Errorf("echo: %w", err)
		}
		bytes += len(frames)
	}
	return float64(bytes/size) / (float64(now()-began) / 1e9), nil
}
