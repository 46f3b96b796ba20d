// Command mortarmq is the command-line client of MortarMQ: it creates topics, publishes and reads messages, tells how a
// broker is doing, and looks into the files of a data directory. Writes go over the client protocol, reads over the
// broker's admin HTTP interface.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)   // the second signal ends the process at once
	signal.Ignore(syscall.SIGPIPE) // a reader that has seen enough ends the command in order, not by a signal
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
