package admin

import (
	"net/http"
	"net/http/pprof"
	"runtime"
	"sync"
)

const (
	// blockProfileRate has one event sampled per so many nanoseconds spent blocked: all longer ones, few of the short ones.
	blockProfileRate = 10_000
	// mutexProfileFraction has one of so many contention events sampled.
	mutexProfileFraction = 10
)

// contention serves the runtime's block and mutex profiles. Sampling them costs something at every lock and channel, so it
// is on only while a request with ?seconds=N is being answered; such a profile holds what happened during these seconds.
type contention struct {
	mu    sync.Mutex
	users int
}

func (c *contention) handler(name string) http.HandlerFunc {
	profile := pprof.Handler(name)
	return func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("seconds") != "" {
			c.use(1)
			defer c.use(-1)
		}
		profile.ServeHTTP(w, r)
	}
}

// use counts the requests that want sampling and switches it on with the first, off with the last.
func (c *contention) use(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users += n
	rate, fraction := 0, 0
	if c.users > 0 {
		rate, fraction = blockProfileRate, mutexProfileFraction
	}
	runtime.SetBlockProfileRate(rate)
	runtime.SetMutexProfileFraction(fraction)
}
