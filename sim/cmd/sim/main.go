// Command sim runs many seeds of the cluster simulator and prints what they went through. It fails if an invariant was broken,
// or a fault or situation that counts occurred too rarely.
package main

import (
	"fmt"
	"os"
	"runtime/pprof"
	"time"

	"github.com/spf13/pflag"

	"github.com/mortarmq/mortarmq/internal/mutant"
	"github.com/mortarmq/mortarmq/sim"
)

// progressEvery is how often a line tells how far the runs are.
const progressEvery = 10 * time.Second

// coverageFrom is from how many seeds on what occurred must be complete.
const coverageFrom = 500

func main() {
	o := sim.ManyOptions{}
	flags := pflag.NewFlagSet("sim", pflag.ExitOnError)
	flags.Uint64Var(&o.First, "first", 1, "the first seed")
	flags.Uint64Var(&o.Count, "seeds", 2000, "how many seeds")
	flags.IntVar(&o.Workers, "workers", 0, "how many run at a time (0: one for each processor)")
	flags.IntVar(&o.Run.Logs, "logs", 1, "how many journals each node has")
	trace := flags.Bool("trace", true, "print what a failed run went through")
	flags.IntVar(&o.MaxFailures, "max-failures", 3, "end after so many failures")
	mutants := flags.Bool("mutants", false, "have the runs find deliberate faults, those named by the arguments or all (needs the build tag mutants)")
	digests := flags.Bool("digests", false, "print a checksum of what happened in each run, to compare machines or builds")
	profile := flags.String("cpuprofile", "", "write a profile of the processor time to this file")
	_ = flags.Parse(os.Args[1:])

	if *mutants {
		if !mutant.Enabled {
			fmt.Fprintln(os.Stderr, "sim: this build has no mutants: build it with -tags=mutants")
			os.Exit(2)
		}
		if len(sim.RunMutants(o, flags.Args(), os.Stdout)) > 0 {
			os.Exit(1)
		}
		return
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "sim: no profile:", err)
			os.Exit(2)
		}
	}
	last := time.Now()
	o.Progress = func(s *sim.Summary, seed uint64, r *sim.Result) {
		if *digests {
			fmt.Fprintf(os.Stdout, "seed %d: digest %016x\n", seed, r.Digest)
		}
		if time.Since(last) < progressEvery {
			return
		}
		last = time.Now()
		fmt.Fprintf(os.Stdout, "%d of %d seeds, %d failures, %.1f hours simulated, %v\n", s.Seeds, o.Count, len(s.Failures), s.Simulated.Hours(), s.Took.Round(time.Second))
	}
	s := sim.RunMany(o)
	pprof.StopCPUProfile()
	s.Print(os.Stdout)
	for _, f := range s.Failures {
		fmt.Fprintf(os.Stdout, "\nseed %d: %s\n  again: MORTARMQ_SIM_SEED=%d MORTARMQ_SIM_LOGS=%d go test -v -run Lost ./sim\n", f.Seed, f.Failure, f.Seed, max(o.Run.Logs, 1))
		if *trace {
			fmt.Fprintln(os.Stdout, f.Trace)
		}
	}
	if len(s.Failures) > 0 || s.Seeds >= coverageFrom && len(s.Missing()) > 0 {
		os.Exit(1)
	}
}
