// Command mortard is the MortarMQ broker: it reads the configuration, wires engine, client port and admin port together
// and runs them until SIGTERM or SIGINT.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit statuses. A broker that was stopped by a signal and closed in order exits with 0.
const (
	exitFailure = 1
	exitUsage   = 2 // wrong arguments or configuration
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "mortard: %v\n", err)
		var usage *usageError
		if errors.As(err, &usage) {
			os.Exit(exitUsage)
		}
		os.Exit(exitFailure)
	}
}

// run is the whole program; it returns when the context has ended and everything is closed.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	inv, err := parse(args, os.Environ(), stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case inv.version:
		_, err := io.WriteString(stdout, versionText())
		return err
	case inv.check:
		for _, text := range inv.warnings {
			fmt.Fprintf(stderr, "mortard: %s\n", text)
		}
		_, err := fmt.Fprintf(stdout, "the configuration is valid: %s, clients at %s, admin at %s, data in %s\n",
			inv.config.part(), inv.config.ListenClient, inv.config.ListenAdmin, inv.config.DataDir)
		return err
	}
	return serve(ctx, inv, stdout, stderr)
}
