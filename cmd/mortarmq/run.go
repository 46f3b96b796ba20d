package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/client"
	"github.com/mortarmq/mortarmq/internal/version"
)

// app is one invocation: its streams and the global flags.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer

	server, admin    string
	token, tokenFile string
	json             bool
	timeout          time.Duration
}

// Defaults of the global flags, and the variables that replace them.
const (
	defaultServer    = "127.0.0.1:" + client.DefaultPort
	defaultAdminPort = "7190"
	defaultAdmin     = "127.0.0.1:" + defaultAdminPort
	defaultTimeout   = 10 * time.Second

	envServer = "MORTAR_SERVER"
	envAdmin  = "MORTAR_ADMIN"
	envToken  = "MORTAR_TOKEN"
)

// run executes one command line and returns the exit code. It ends early, in an orderly way, when ctx does.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	if f := (*failure)(nil); errors.As(err, &f) {
		if !errors.Is(err, errReaderGone) {
			fmt.Fprintf(stderr, "mortarmq: %s\n", errorText(err))
		}
		return f.code
	}
	fmt.Fprintf(stderr, "mortarmq: %v\n", err)
	// Everything that did not come out of a command is about the command line.
	fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", cmd.CommandPath())
	return exitUsage
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "mortarmq",
		Short: "Command-line client of the MortarMQ message broker",
		Long: `mortarmq publishes and reads messages, manages topics and tells how a broker is doing.

Results go to standard output: tab-separated without a header, or JSON with --json. Everything else goes to standard error.

Exit codes: 0 done, 2 bad arguments, 3 the broker can't be reached, 4 the broker refused,
1 anything that went wrong on this machine (a file, the output, an interrupt, damage found by dump).`,
		Version:       version.Name(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          knownCommand,
		RunE:          needsCommand,
	}
	root.SetVersionTemplate(versionText())
	f := root.PersistentFlags()
	f.StringVar(&a.server, "server", envOr(envServer, defaultServer), "client address of the broker, host[:port]; of a cluster all nodes, separated by commas (env "+envServer+")")
	f.StringVar(&a.admin, "admin", envOr(envAdmin, defaultAdmin), "admin address of the broker, host[:port]; of a cluster several, separated by commas (env "+envAdmin+")")
	f.StringVar(&a.token, "token", "", "token to authenticate with; visible to other users of this machine, prefer --token-file (env "+envToken+")")
	f.StringVar(&a.tokenFile, "token-file", "", "file that holds the token")
	f.BoolVar(&a.json, "json", false, "print JSON")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "how long to wait for the broker's answer")
	root.AddCommand(
		a.topicsCommand(), a.groupsCommand(), a.leaderCommand(), a.brokerCommand(),
		a.pubCommand(), a.subCommand(), a.dlqCommand(), a.benchCommand(), a.clusterCommand(),
		a.dumpCommand(), a.hashTokenCommand(), a.versionCommand(),
	)
	return root
}

func envOr(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}

// needsCommand is what a command does that only has commands below it.
func needsCommand(cmd *cobra.Command, _ []string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return fmt.Errorf("say which: %s", strings.Join(names, ", "))
}

// knownCommand refuses what is no command below cmd, with those that may have been meant.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("unknown command %q for %q (did you mean %s?)", args[0], cmd.CommandPath(), strings.Join(near, " or "))
	}
	return fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
}

// group returns a command that only holds others.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: knownCommand, RunE: needsCommand}
	c.AddCommand(commands...)
	return c
}

// does makes a cobra function of f, so that its errors carry their exit code.
func does(f func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return failed(f(cmd.Context(), args))
	}
}

// requestContext bounds one request.
func (a *app) requestContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.timeout)
}

// dial connects to the broker.
func (a *app) dial(ctx context.Context) (*client.Client, error) {
	if a.timeout <= 0 {
		return nil, usagef("--timeout must be positive, it is %v", a.timeout)
	}
	for addr := range strings.SplitSeq(a.server, ",") {
		if _, err := client.CompleteAddr(strings.TrimSpace(addr), client.DefaultPort); err != nil {
			return nil, usagef("--server: %w", err)
		}
	}
	token, err := a.readToken()
	if err != nil {
		return nil, err
	}
	logger := slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: slog.LevelWarn, ReplaceAttr: withoutTime}))
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	c, err := client.Dial(ctx, a.server, client.WithToken(token), client.WithLogger(logger), client.WithDialTimeout(min(a.timeout, 5*time.Second)))
	if err != nil {
		return nil, a.brokerError(err)
	}
	return c, nil
}

// request calls do with a connected client and the time that one request has.
func (a *app) request(ctx context.Context, do func(ctx context.Context, c *client.Client) error) error {
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := a.requestContext(ctx)
	defer cancel()
	return do(ctx, c)
}

func withoutTime(groups []string, attr slog.Attr) slog.Attr {
	if len(groups) == 0 && attr.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return attr
}

// readToken returns the token: the flag's, the file's or the environment's, in this order.
func (a *app) readToken() (string, error) {
	switch {
	case a.token != "" && a.tokenFile != "":
		return "", usagef("--token and --token-file exclude each other")
	case a.token != "":
		return a.token, nil
	case a.tokenFile != "":
		b, err := os.ReadFile(a.tokenFile)
		if err != nil {
			return "", usagef("reading the token: %w", err)
		}
		return strings.TrimRight(string(b), "\r\n"), nil
	}
	return os.Getenv(envToken), nil
}
