package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// maxTokenLen is how long a token may be on the wire, in bytes.
const maxTokenLen = 1<<16 - 1

// digestRow is the result of hash-token.
type digestRow struct {
	SHA256 string `json:"sha256"`
}

func (a *app) hashTokenCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "hash-token [TOKEN]",
		Short: "Print a token's SHA-256 digest for the broker's auth_token_digests",
		Long: `Print the SHA-256 digest of a token in hexadecimal: what goes into the broker's configuration (auth_token_digests).

Without an argument the token is the first line of standard input; that keeps it out of the list of processes.`,
		Args: cobra.MaximumNArgs(1),
	}
	c.RunE = does(func(_ context.Context, args []string) error {
		token := ""
		if len(args) == 1 {
			token = args[0]
		} else {
			line, err := bufio.NewReader(io.LimitReader(a.stdin, maxTokenLen+2)).ReadString('\n')
			if err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("reading the token: %w", err)
			}
			token = strings.TrimRight(line, "\r\n")
		}
		switch {
		case token == "":
			return usagef("the token is empty: give one as the argument or on standard input")
		case len(token) > maxTokenLen:
			return usagef("the token is longer than %d bytes", maxTokenLen)
		}
		sum := sha256.Sum256([]byte(token))
		return printRow(a, digestRow{hex.EncodeToString(sum[:])})
	})
	return c
}

// versionRow is the result of version.
type versionRow struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
}

func (a *app) versionCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program: version, commit, go",
		Args:  cobra.NoArgs,
	}
	c.RunE = does(func(context.Context, []string) error { return printRow(a, buildVersion()) })
	return c
}

// version is set by release builds with -X; otherwise it is what Go recorded about the module.
var version = ""

// buildVersion tells what was built.
func buildVersion() versionRow {
	v := versionRow{Version: "(devel)", Commit: "unknown", Go: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if version != "" {
		v.Version = version
	}
	if !ok {
		return v
	}
	if info.Main.Version != "" && version == "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Commit = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				v.Commit += "+changes"
			}
		}
	}
	return v
}
