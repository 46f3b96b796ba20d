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
	"strings"

	"github.com/spf13/cobra"

	"github.com/mortarmq/mortarmq/internal/version"
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
	c.RunE = does(func(context.Context, []string) error {
		return printRow(a, versionRow{version.Name(), version.Commit(), runtime.Version()})
	})
	return c
}

// versionText is what --version prints.
func versionText() string {
	return fmt.Sprintf("mortarmq %s\ncommit: %s\n%s %s/%s\n", version.Name(), version.Commit(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
