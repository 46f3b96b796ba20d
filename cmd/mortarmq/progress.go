package main

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// When the progress line appears, and how often it changes.
const (
	progressAfter = time.Second
	progressEvery = 200 * time.Millisecond
)

// progress shows status on standard error while work goes on for long, if that is a terminal. The caller ends it with
// stop, which clears the line.
func (a *app) progress(status func() string) (stop func()) {
	f, ok := a.stderr.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func() {}
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		shown := false
		next := time.NewTimer(progressAfter)
		defer next.Stop()
		for {
			select {
			case <-next.C:
				fmt.Fprintf(f, "\r\x1b[K%s", status())
				shown = true
				next.Reset(progressEvery)
			case <-done:
				if shown {
					fmt.Fprint(f, "\r\x1b[K")
				}
				return
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

// hint tells somebody at a terminal what goes on. Scripts need no such thing.
func (a *app) hint(format string, args ...any) {
	if f, ok := a.stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		a.note(format, args...)
	}
}

// byteCount prints a number of bytes for people.
func byteCount(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, suffix := float64(n)/unit, 0
	for v >= unit && suffix < len("KMGTP")-1 {
		v /= unit
		suffix++
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[suffix])
}
