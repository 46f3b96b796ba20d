package client

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// debug logs what happened to one connection.
func (s *Server) debug(c *conn, msg string, attrs ...slog.Attr) {
	ctx := context.Background()
	if s.opts.Logger.Enabled(ctx, slog.LevelDebug) {
		attrs = append(attrs, slog.String("remote", c.remote()), slog.Uint64("connection", c.id))
		s.opts.Logger.LogAttrs(ctx, slog.LevelDebug, msg, attrs...)
	}
}

// warn logs what clients can provoke: at most once a second, with the number of warnings left out.
func (s *Server) warn(msg string, attrs ...slog.Attr) {
	now, last := int64(s.now())+1, s.lastWarn.Load()
	if last != 0 && now-last < int64(time.Second) || !s.lastWarn.CompareAndSwap(last, now) {
		s.suppressed.Add(1)
		return
	}
	if n := s.suppressed.Swap(0); n > 0 {
		attrs = append(attrs, slog.Uint64("suppressed", n))
	}
	s.opts.Logger.LogAttrs(context.Background(), slog.LevelWarn, msg, attrs...)
}

// gnetLogger is gnet's logger. What gnet tells at its levels is about single connections at most, so it goes one lower.
type gnetLogger struct{ log *slog.Logger }

func (g gnetLogger) Debugf(format string, args ...any) { g.logf(slog.LevelDebug, format, args) }
func (g gnetLogger) Infof(format string, args ...any)  { g.logf(slog.LevelDebug, format, args) }
func (g gnetLogger) Warnf(format string, args ...any)  { g.logf(slog.LevelDebug, format, args) }
func (g gnetLogger) Errorf(format string, args ...any) { g.logf(slog.LevelWarn, format, args) }

// Fatalf does not exit: the broker decides itself what is fatal.
func (g gnetLogger) Fatalf(format string, args ...any) { g.logf(slog.LevelError, format, args) }

func (g gnetLogger) logf(level slog.Level, format string, args []any) {
	ctx := context.Background()
	if g.log.Enabled(ctx, level) {
		g.log.LogAttrs(ctx, level, "gnet: "+fmt.Sprintf(format, args...))
	}
}
