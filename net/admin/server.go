package admin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// snapshotTimeout bounds how long a request waits for the broker's state.
const snapshotTimeout = 5 * time.Second

// Options configures a Server.
type Options struct {
	// Addr is the TCP address to listen on, host:port; port 0 picks a free one.
	Addr string
	// Source is the broker; required.
	Source Source
	// Metrics switches /metrics on.
	Metrics bool
	// Logger defaults to slog.Default().
	Logger *slog.Logger
}

// Server serves the admin port. Create it with New, then Start, then Shutdown.
type Server struct {
	opts     Options
	http     *http.Server
	listener net.Listener
	served   chan error
}

// New returns a server that does not listen yet.
func New(opts Options) *Server {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	s := &Server{opts: opts, served: make(chan error, 1)}
	s.http = &http.Server{
		Handler: s.routes(),
		// Profiles take as long as they are asked to, so there is no limit on the answers.
		ReadTimeout:    10 * time.Second,
		IdleTimeout:    time.Minute,
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       slog.NewLogLogger(opts.Logger.Handler(), slog.LevelDebug),
	}
	return s
}

// Start listens and serves until Shutdown. The context bounds the start only.
func (s *Server) Start(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.opts.Addr)
	if err != nil {
		return fmt.Errorf("admin port: listening on %q: %w", s.opts.Addr, err)
	}
	s.listener = listener
	go func() { s.served <- s.http.Serve(strayListener{listener}) }()
	return nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Shutdown stops accepting, waits for the requests in progress and closes. When the context ends first they are cut.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		err = fmt.Errorf("admin port: requests were cut: %w", errors.Join(err, s.http.Close()))
	}
	if serveErr := <-s.served; !errors.Is(serveErr, http.ErrServerClosed) {
		err = errors.Join(err, fmt.Errorf("admin port: %w", serveErr))
	}
	return err
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /stats", s.stats)
	mux.HandleFunc("GET /broker", s.broker)
	mux.HandleFunc("GET /leader", s.leader)
	mux.HandleFunc("GET /topics", s.topics)
	mux.HandleFunc("GET /groups", s.groups)
	mux.HandleFunc("GET /groups/{name...}", s.members)
	if s.opts.Metrics {
		mux.Handle("GET /metrics", s.metrics())
	}
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	sampled := new(contention)
	mux.Handle("GET /debug/pprof/block", sampled.handler("block"))
	mux.Handle("GET /debug/pprof/mutex", sampled.handler("mutex"))
	return mux
}

func (s *Server) metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		newCollector(s.opts.Source),
	)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: promLogger{s.opts.Logger},
		// The runtime's metrics are wanted most when the broker does not answer.
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
	})
}

type promLogger struct{ log *slog.Logger }

func (l promLogger) Println(v ...any) { l.log.Warn("collecting metrics", "error", fmt.Sprint(v...)) }

// snapshot asks the source, or answers the request with the reason why there is none.
func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) (*Snapshot, bool) {
	ctx, cancel := context.WithTimeout(r.Context(), snapshotTimeout)
	defer cancel()
	snap, err := s.opts.Source.Snapshot(ctx)
	if err != nil {
		http.Error(w, "the broker does not tell its state: "+err.Error(), http.StatusServiceUnavailable)
		return nil, false
	}
	return snap, true
}
