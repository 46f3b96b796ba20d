package admin

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// TestContention_SamplesOnlyWhileSomebodyAsks holds a lock that others want during the request; the sampling is off before
// and after.
func TestContention_SamplesOnlyWhileSomebodyAsks(t *testing.T) {
	if f := runtime.SetMutexProfileFraction(-1); f != 0 {
		t.Fatalf("contention is sampled without being asked for: 1 in %d", f)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range 4 {
		wg.Go(func() {
			for {
				mu.Lock()
				runtime.Gosched()
				mu.Unlock()
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	var c contention
	w := httptest.NewRecorder()
	c.handler("mutex")(w, httptest.NewRequest(http.MethodGet, "/debug/pprof/mutex?seconds=1", nil))
	close(stop)
	wg.Wait()
	if w.Code != http.StatusOK || w.Body.Len() == 0 {
		t.Errorf("status %d, %d bytes", w.Code, w.Body.Len())
	}
	if f := runtime.SetMutexProfileFraction(-1); f != 0 {
		t.Errorf("contention is still sampled: 1 in %d", f)
	}
	w = httptest.NewRecorder()
	c.handler("block")(w, httptest.NewRequest(http.MethodGet, "/debug/pprof/block?debug=1", nil))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "contention") {
		t.Errorf("without seconds: status %d: %.200s", w.Code, w.Body)
	}
}

func TestContention_TheLastRequestSwitchesItOff(t *testing.T) {
	var c contention
	c.use(1)
	c.use(1)
	c.use(-1)
	if f := runtime.SetMutexProfileFraction(-1); f != mutexProfileFraction {
		t.Errorf("with one request left 1 in %d is sampled, want %d", f, mutexProfileFraction)
	}
	c.use(-1)
	if f := runtime.SetMutexProfileFraction(-1); f != 0 {
		t.Errorf("with none left 1 in %d is sampled", f)
	}
}
