package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/mortarmq/mortarmq/engine"
	"github.com/mortarmq/mortarmq/internal/version"
	"github.com/mortarmq/mortarmq/net/admin"
	"github.com/mortarmq/mortarmq/net/client"
	"github.com/mortarmq/mortarmq/ring"
)

// timerSlack is what the kernel may delay a sleep by; its default of 50 us would show in every commit.
const timerSlack = time.Nanosecond

// How long the steps of an orderly end may take. Acknowledged data is safe however they end.
const (
	drainTimeout = 10 * time.Second // answering and closing the clients
	closeTimeout = 60 * time.Second // writing out and checkpointing
	adminTimeout = 2 * time.Second  // requests of the admin port in progress
)

// broker is the running process.
type broker struct {
	config *Config
	log    *slog.Logger
	lock   *dirLock
	source *source
	engine *engine.Engine // of a node on its own
	node   *node          // of one of a cluster
	client *client.Server
	admin  *admin.Server // nil when it is switched off
}

// serve runs the broker until the context ends.
func serve(ctx context.Context, inv *invocation, stdout, stderr io.Writer) error {
	level, err := parseLevel(inv.config.LogLevel)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	for _, text := range inv.warnings {
		log.Warn(text)
	}
	b := &broker{config: &inv.config, log: log, source: newSource(&inv.config)}
	err = b.start(ctx)
	if err == nil {
		err = b.announce(stdout, inv.readyFile)
	}
	if err == nil {
		<-ctx.Done()
		log.Info("stopping", "reason", context.Cause(ctx))
		b.notify(stateStopping)
	}
	return errors.Join(err, b.stop())
}

// setProcs gives the scheduler a processor for each goroutine that spends its life in a system call: a shard, its store,
// and the coordinator. With as many processors as cores they compete for them each time a call returns, and the scheduler's monitor
// has to take processors away from blocked threads; measured on 2 cores, that is a third of the CPU time of a lone
// publish. A GOMAXPROCS in the environment is left as it is.
func setProcs(shards int) {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 2*max(shards, 1) + 1)
	}
}

// start brings the parts up, the admin port first: a long recovery can be watched there.
func (b *broker) start(ctx context.Context) error {
	began := time.Now()
	c := b.config
	var err error
	if b.lock, err = lockDir(c.DataDir); err != nil {
		return err
	}
	if err := ring.SetTimerSlack(timerSlack); err != nil {
		b.log.Debug("timers stay as precise as they are", "error", err)
	}
	setProcs(c.Shards)
	b.log.Info("starting", "version", version.Name(), "commit", version.Commit(), "data_dir", c.DataDir, "pid", os.Getpid())
	if c.ListenAdmin != off {
		if !isLoopback(c.ListenAdmin) {
			b.log.Warn("the admin port has no authentication and others can reach it", "listen_admin", c.ListenAdmin)
		}
		a := admin.New(admin.Options{Addr: c.ListenAdmin, Source: b.source, Metrics: c.MetricsEnabled, Logger: b.log})
		if err := a.Start(ctx); err != nil {
			return fmt.Errorf("%w (the address is listen_admin, --listen-admin)", err)
		}
		b.admin = a
	}
	serves, err := b.open(ctx)
	if err != nil {
		return err
	}
	digests, err := c.digests()
	if err != nil {
		return err
	}
	srv, err := client.New(client.Options{
		Addr: c.ListenClient, Loops: c.EventLoops, TokenDigests: digests, Logger: b.log, Handler: serves,
	})
	if err != nil {
		return err
	}
	if err := srv.Start(ctx); err != nil {
		return fmt.Errorf("%w (the address is listen_client, --listen-client)", err)
	}
	b.client = srv
	b.source.client.Store(srv)
	if len(digests) == 0 {
		b.log.Warn("no tokens are configured: any client on this machine may do anything", "key", "auth_token_digests")
	}
	b.log.Info("ready", "client", srv.Addr().String(), "admin", b.adminAddr(), "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// open opens the engine, or joins the cluster, and returns what serves the clients.
func (b *broker) open(ctx context.Context) (client.Handler, error) {
	var err error
	if b.config.clustered() {
		if b.node, err = openNode(ctx, b.config, b.log); err != nil {
			return nil, err
		}
		b.source.node.Store(b.node)
		return *b.node, nil
	}
	if b.engine, err = engine.Open(b.config.engineOptions(b.log)); err != nil {
		return nil, fmt.Errorf("opening %s: %w", b.config.DataDir, err)
	}
	b.source.engine.Store(b.engine)
	return handler{b.engine}, nil
}

func (b *broker) adminAddr() string {
	if b.admin == nil {
		return off
	}
	return b.admin.Addr().String()
}

// ready is the content of the ready file.
type ready struct {
	PID    int    `json:"pid"`
	Client string `json:"client"`
	Admin  string `json:"admin"`
}

// announce tells who waits for it that the broker serves: one line, and the file if one was asked for.
func (b *broker) announce(stdout io.Writer, path string) error {
	r := ready{os.Getpid(), b.client.Addr().String(), b.adminAddr()}
	if _, err := fmt.Fprintf(stdout, "mortard ready: client=%s admin=%s\n", r.Client, r.Admin); err != nil {
		return err
	}
	b.notify(stateReady)
	if path == "" {
		return nil
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// Renamed into place, so that nobody reads half of it.
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("ready file: %w", err)
	}
	_, err = tmp.Write(append(text, '\n'))
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("ready file: %w", errors.Join(err, os.Remove(tmp.Name())))
	}
	return nil
}

// notify is notify whose failure does not matter to the broker.
func (b *broker) notify(state string) {
	if err := notify(state); err != nil {
		b.log.Warn("the service manager can't be told", "error", err)
	}
}

// stop ends what start has begun, clients first, and gives the data directory free last.
func (b *broker) stop() error {
	began := time.Now()
	b.source.stopping.Store(true)
	var errs []error
	if b.client != nil {
		if b.node != nil {
			b.node.Stopping()
			b.node.HandOver() // the clients may take a while to close
		} else {
			b.engine.Stopping()
		}
		ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
		if err := b.client.Shutdown(ctx); err != nil {
			b.log.Warn("closing the clients", "error", err) // theirs, not ours: they reconnect
		}
		cancel()
	}
	if b.engine != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		errs = append(errs, b.engine.Close(ctx))
		cancel()
	}
	if b.node != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		errs = append(errs, b.node.close(ctx))
		cancel()
	}
	if b.admin != nil {
		ctx, cancel := context.WithTimeout(context.Background(), adminTimeout)
		if err := b.admin.Shutdown(ctx); err != nil {
			b.log.Debug("closing the admin port", "error", err)
		}
		cancel()
	}
	if b.lock != nil {
		errs = append(errs, b.lock.unlock())
	}
	err := errors.Join(errs...)
	if err == nil && b.client != nil {
		b.log.Info("stopped", "took", time.Since(began).Round(time.Millisecond))
	}
	return err
}

// handler gives the client port the engine.
type handler struct{ *engine.Engine }

// NewIngress implements client.Handler.
func (h handler) NewIngress() client.Ingress { return h.Engine.NewIngress() }
