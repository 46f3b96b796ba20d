package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/protocol"
)

// The exit codes.
const (
	exitDone        = 0
	exitLocal       = 1 // something on this machine: a file, the output, an interrupt, damage found
	exitUsage       = 2 // bad arguments
	exitUnreachable = 3 // no connection, or no answer in time
	exitRefused     = 4 // the broker said no
)

// failure is an error with the exit code that it ends the program with.
type failure struct {
	code int
	err  error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// usagef is an error about the arguments.
func usagef(format string, args ...any) error {
	return &failure{exitUsage, fmt.Errorf(format, args...)}
}

func unreachablef(format string, args ...any) error {
	return &failure{exitUnreachable, fmt.Errorf(format, args...)}
}

func refusedf(format string, args ...any) error {
	return &failure{exitRefused, fmt.Errorf(format, args...)}
}

// failed gives err an exit code, if it has none yet: what comes without one is about this machine.
func failed(err error) error {
	var f *failure
	if err == nil || errors.As(err, &f) {
		return err
	}
	return &failure{exitLocal, err}
}

// errInterrupted ends a command that SIGINT or SIGTERM stopped before it was done.
var errInterrupted = &failure{exitLocal, errors.New("interrupted")}

// brokerError gives an error of the client library its exit code, and an end that says what to do about it.
func (a *app) brokerError(err error) error {
	var f *failure
	switch _, refused := protocol.CodeOf(err); {
	case err == nil:
		return nil
	case errors.As(err, &f):
		return err
	case refused:
		return &failure{exitRefused, err}
	case errors.Is(err, client.ErrKeyTooLarge), errors.Is(err, client.ErrValueTooLarge):
		return &failure{exitUsage, err}
	case errors.Is(err, context.Canceled):
		return errInterrupted
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return unreachablef("%w: no answer from %s within %v: is it the right address (--server)? --timeout waits longer", err, a.server, a.timeout)
	default:
		return unreachablef("%w: is a broker running there? --server or %s names another one", err, envServer)
	}
}

// errorText is what the user reads. An error of the library's own checks ends with the general text of its code, which says
// less than what stands before it.
func errorText(err error) string {
	text := err.Error()
	var refusal *client.Error // the broker's own words
	if code, ok := protocol.CodeOf(err); ok && !errors.As(err, &refusal) {
		if special, general := strings.CutSuffix(text, ": "+code.Error()); general {
			return fmt.Sprintf("%s (%s)", special, code.Name())
		}
	}
	return text
}
