package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// invocation is what the command line and the environment ask for.
type invocation struct {
	config    Config
	file      string // "" = none
	check     bool
	version   bool
	readyFile string
	warnings  []string // what is odd and may still be meant
}

// usageError is a mistake in the arguments or the configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// override is a value from a flag or a variable.
type override struct {
	setting *setting
	text    string
	from    string
}

// parse puts the configuration together: defaults, file, variables, flags, each stronger than the one before. environ holds
// the variables as "NAME=value". --help writes to help and returns flag.ErrHelp.
func parse(args, environ []string, help io.Writer) (*invocation, error) {
	inv := &invocation{config: Default()}
	var fromFlags []override
	flags := flag.NewFlagSet("mortard", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&inv.file, "config", "", "read the configuration from `FILE` (MORTAR_CONFIG)")
	flags.BoolVar(&inv.check, "check-config", false, "check the configuration and exit")
	flags.BoolVar(&inv.version, "version", false, "print the version and exit")
	flags.StringVar(&inv.readyFile, "ready-file", "", "write the addresses to `FILE` when the broker is ready")
	for i := range settings {
		s := &settings[i]
		note := func(text string) error {
			fromFlags = append(fromFlags, override{s, text, "--" + s.flag()})
			return nil
		}
		if _, isBool := s.field(&inv.config).(*bool); isBool {
			flags.BoolFunc(s.flag(), s.help, note)
		} else {
			flags.Func(s.flag(), s.help, note)
		}
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		usage(flags, help)
		return nil, err
	case err != nil:
		return nil, &usageError{suggestFlag(err, flags)}
	case flags.NArg() > 0:
		return nil, &usageError{fmt.Errorf("unexpected argument %q: mortard takes flags only (mortard --help)", flags.Arg(0))}
	}
	if inv.version {
		return inv, nil // told whatever the configuration is like
	}
	if inv.file == "" {
		inv.file, _ = lookup(environ, configVariable)
	}
	if err := inv.load(fromFlags, environ); err != nil {
		return nil, &usageError{err}
	}
	return inv, nil
}

func (inv *invocation) load(fromFlags []override, environ []string) error {
	errs := inv.checkVariables(environ)
	c := &inv.config
	if inv.file != "" {
		text, err := os.ReadFile(inv.file)
		if err != nil {
			return fmt.Errorf("configuration: %w", err)
		}
		if err := c.parseFile(text); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", inv.file, err))
		}
	}
	var overrides []override
	for i := range settings {
		if text, ok := lookup(environ, settings[i].variable()); ok {
			overrides = append(overrides, override{&settings[i], text, settings[i].variable()})
		}
	}
	overrides = append(overrides, fromFlags...)
	listenGiven := inv.file != ""
	for _, o := range overrides {
		listenGiven = listenGiven || o.setting.key == "listen_client"
		if err := o.setting.set(c, o.text); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", o.from, err))
		}
	}
	// Tried out on a laptop, the broker must not be open to the network.
	if !listenGiven && len(c.AuthTokenDigests) == 0 {
		c.ListenClient = "127.0.0.1:7188"
	}
	// What a wrong key or value was to set has its default here, which is valid. Of a broken file the rest isn't known.
	var broken *brokenFile
	if err := errors.Join(errs...); !errors.As(err, &broken) {
		errs = append(errs, c.Validate())
	}
	return errors.Join(errs...)
}

// Variables that are no settings. The last three are the command line's.
const (
	variablePrefix = "MORTAR_"
	configVariable = variablePrefix + "CONFIG"
)

var otherVariables = []string{configVariable, "MORTAR_SERVER", "MORTAR_ADMIN", "MORTAR_TOKEN"}

// lookup returns the last value of a variable.
func lookup(environ []string, name string) (value string, ok bool) {
	for _, pair := range environ {
		if text, found := strings.CutPrefix(pair, name+"="); found {
			value, ok = text, true
		}
	}
	return value, ok
}

// checkVariables finds MORTAR_ variables that nothing reads. One that is nearly a setting is a mistake, which would have the
// broker run with something else than what was meant; others may be somebody else's (Kubernetes sets MORTAR_PORT for a
// service called mortar) and are only warned of.
func (inv *invocation) checkVariables(environ []string) []error {
	known := slices.Clone(otherVariables)
	for i := range settings {
		known = append(known, settings[i].variable())
	}
	var errs []error
	for _, pair := range environ {
		name, _, _ := strings.Cut(pair, "=")
		rest, ours := strings.CutPrefix(name, variablePrefix)
		if !ours || slices.Contains(known, name) {
			continue
		}
		if near := nearest(rest, settingKeys()); near != "" {
			errs = append(errs, fmt.Errorf("unknown variable: %s (did you mean %s%s?)", name, variablePrefix, strings.ToUpper(near)))
			continue
		}
		inv.warnings = append(inv.warnings, fmt.Sprintf("nothing reads the variable %s: mortard --help lists the settings", name))
	}
	return errs
}

func settingKeys() []string {
	keys := make([]string, len(settings))
	for i := range settings {
		keys[i] = settings[i].key
	}
	return keys
}

// suggestFlag adds the flag that was probably meant.
func suggestFlag(err error, flags *flag.FlagSet) error {
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !unknown {
		return fmt.Errorf("%w (mortard --help)", err)
	}
	var names []string
	flags.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	slices.Sort(names)
	name = strings.TrimPrefix(name, "-")
	if near := nearest(name, names); near != "" {
		return fmt.Errorf("unknown flag: --%s (did you mean --%s?)", name, near)
	}
	return fmt.Errorf("unknown flag: --%s (mortard --help lists the flags)", name)
}

func usage(flags *flag.FlagSet, w io.Writer) {
	fmt.Fprint(w, `mortard is the MortarMQ broker.

Usage: mortard [--config FILE] [flags]

Every key of the configuration file is also a flag and a variable: data_dir is --data-dir and MORTAR_DATA_DIR. Flags
override variables, variables override the file, the file overrides the defaults. Lists are separated by commas.

Flags:
`)
	defaults := Default()
	flags.VisitAll(func(f *flag.Flag) {
		name, help := flag.UnquoteUsage(f)
		if i := slices.IndexFunc(settings, func(s setting) bool { return s.flag() == f.Name }); i >= 0 {
			name = ""
			help = fmt.Sprintf("%s (default %s)", help, display(settings[i].field(&defaults)))
		}
		if name != "" {
			name = " " + name
		}
		fmt.Fprintf(w, "  --%s%s\n        %s\n", f.Name, name, help)
	})
}

// display shows a field's value as a flag would be given.
func display(field any) string {
	switch f := field.(type) {
	case *string:
		if *f == "" {
			return "none"
		}
		return *f
	case *bool:
		return fmt.Sprint(*f)
	case *int:
		return fmt.Sprint(*f)
	case *int64:
		return fmt.Sprint(*f)
	case *[]string:
		if len(*f) > 0 {
			return strings.Join(*f, ",")
		}
	}
	return "none"
}
