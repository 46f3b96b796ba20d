package client

import (
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mortarmq/mortarmq/protocol"
)

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestServer_ChurnLeavesNothingBehind(t *testing.T) {
	e := newFakeEngine(2)
	s := serve(t, e, nil)
	warm := connect(t, s)
	_ = warm.conn.Close()
	eventually(t, "the first connection is gone", func() bool { return s.Stats().Connections == 0 })
	files, goroutines := openFiles(t), runtime.NumGoroutine()

	const clients, rounds = 8, 250
	var wg sync.WaitGroup
	for id := range clients {
		wg.Go(func() {
			for i := range rounds {
				p := connect(t, s)
				switch (id + i) % 4 {
				case 0: // leaves with requests in flight
					p.send(pubFrame(pubFrame(nil, 1, nil), 2, make([]byte, 100_000)))
				case 1: // leaves in the middle of a frame
					p.send(pubFrame(nil, 1, make([]byte, 300_000))[:200_000])
				case 2: // leaves properly
					p.send(pubFrame(nil, 1, nil))
					p.expectPub(1)
				case 3: // leaves with a reset
					p.send(pubFrame(nil, 1, nil))
					_ = p.conn.SetLinger(0)
				}
				_ = p.conn.Close()
			}
		})
	}
	wg.Wait()
	eventually(t, "all connections are gone", func() bool { return s.Stats().Connections == 0 })
	if st := s.Stats(); st.Accepted != clients*rounds+1 {
		t.Errorf("%d connections accepted", st.Accepted)
	}
	eventually(t, "the frames' memory is back", func() bool { st := s.Stats(); return st.PartialBytes == 0 && st.OwnedBytes == 0 })
	eventually(t, "no file stays open", func() bool { return openFiles(t) <= files })
	eventually(t, "no goroutine stays", func() bool { return runtime.NumGoroutine() <= goroutines })
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.loops {
		for i, c := range l.wheel.buckets {
			if c != nil {
				t.Fatalf("a connection stayed in bucket %d of the timer wheel", i)
			}
		}
	}
	s.poller.mu.Lock()
	defer s.poller.mu.Unlock()
	if n := len(s.poller.conns); n != 0 {
		t.Errorf("%d connections stayed with the poller", n)
	}
}

// rawConnect connects without the memory that package net needs per connection.
func rawConnect(t *testing.T, addr unix.SockaddrInet4, hello []byte) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &addr); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, hello); err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestServer_IdleConnectionsCostLittle(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	// Both ends are in this process, and accepting needs one more for a moment.
	n := min(10_000, (int(limit.Cur)-openFiles(t)-64)/2)
	s := serve(t, newFakeEngine(1), func(o *Options) { o.MaxConnections = n })
	var addr unix.SockaddrInet4
	addr.Addr = [4]byte{127, 0, 0, 1}
	addr.Port = s.Addr().(*net.TCPAddr).Port
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	hello := append(connectFrame("t"), pubFrame(nil, 1, make([]byte, 200))...)
	before := heap()
	fds := make([]int, n)
	for i := range fds {
		fds[i] = rawConnect(t, addr, hello)
	}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	answer := make([]byte, protocol.OKEmptyFrameLen+protocol.PubResultFrameLen)
	for _, fd := range fds {
		if _, err := io.ReadFull(fdReader(fd), answer); err != nil {
			t.Fatal(err)
		}
	}
	per := (heap() - before) / int64(n)
	t.Logf("%d idle connections, %d bytes of heap each", n, per)
	if per > 6<<10 {
		t.Errorf("an idle connection costs %d bytes of heap", per)
	}
	if got := s.Stats().Connections; got != int64(n) {
		t.Errorf("%d connections", got)
	}
}

type fdReader int

func (fd fdReader) Read(b []byte) (int, error) {
	n, err := unix.Read(int(fd), b)
	if n == 0 && err == nil {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func TestServer_AllocatesNothingPerMessage(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	e := newFakeEngine(1)
	s := serve(t, e, nil)
	p := connect(t, s)
	const window, rounds = 512, 200
	var out []byte
	for seq := range uint64(window) {
		out = pubFrame(out, seq, make([]byte, 100))
	}
	answers := make([]byte, window*protocol.PubResultFrameLen)
	exchange := func() {
		p.send(out)
		if _, err := io.ReadFull(p.conn, answers); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		exchange()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range rounds {
		exchange()
	}
	runtime.ReadMemStats(&after)
	per := float64(after.Mallocs-before.Mallocs) / (window * rounds)
	t.Logf("%.4f allocations per message", per)
	// Wake-ups of a loop allocate inside gnet; there are a few per window, not one per message.
	if per > 0.05 {
		t.Errorf("%.3f allocations per message", per)
	}
}
