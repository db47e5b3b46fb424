// The first and only process of the emulated machine: runs the sets of cases that the kernel's command line names, says how each
// ended, and switches the machine off through the emulator's own port.
#include <stdio.h>
#include <string.h>
#include <sys/io.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (strncmp(argv[i], "set:", 4) != 0) continue;
    const double start = now();
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      execl("/kernels_test", "kernels_test", argv[i] + 4, NULL);
      _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("ended %s %d after %.1f s\n", argv[i] + 4, WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), now() - start);
  }
  fflush(stdout);
  sleep(1);
  ioperm(0x8900, 1, 1);
  for (const char* c = "Shutdown"; *c; ++c) outb(*c, 0x8900);
  for (;;) pause();
}
