// Which processes Peers takes for gone, and what it holds of them. Prints "ok".
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/health/peers.h"

using pg_sdma::Peers;

namespace {

constexpr int kDescriptors = 256;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

pid_t start() {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it holds what this program prints to
    for (;;) pause();
  }
  return child;
}

void end(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

int descriptors() {
  int open = 0;
  for (int number = 0; number < kDescriptors; ++number) open += fcntl(number, F_GETFD) >= 0 ? 1 : 0;
  return open;
}

std::exception_ptr refusal(const std::vector<int>& pids) {
  try {
    const Peers peers(pids);
  } catch (const std::runtime_error&) {
    return std::current_exception();
  }
  return nullptr;
}

std::string what(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error& caught) {
    return caught.what();
  }
}

}  // namespace

int main() {
  const pid_t child = start();
  const std::vector<int> pids{getpid(), child};
  const int before = descriptors();
  {
    std::deque<Peers> groups;
    for (int i = 0; i < 100; ++i) groups.emplace_back(pids);
    require(descriptors() == before + 2, "all groups share a descriptor for each process");
    require(!groups[0].gone(0) && !groups[99].gone(1), "both live");

    const pid_t another = start();
    const rlimit limit{kDescriptors, kDescriptors};
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit is set");
    std::vector<int> taken;
    for (int file; (file = open("/dev/null", O_RDONLY)) >= 0;) taken.push_back(file);
    const std::exception_ptr unwatched = refusal({another});
    const std::exception_ptr watched = refusal(pids);
    end(another);
    // A sanitizer needs descriptors to look at what was thrown.
    for (const int file : taken) close(file);
    require(what(unwatched).find("Too many open files") != std::string::npos,
            "a process that cannot be watched is refused");
    require(!watched, "one that is watched already is not");
    require(Peers({another}).gone(0), "one that has ended before is gone");

    end(child);
    require(!groups[0].gone(0), "the own process lives");
    for (const Peers& group : groups) require(group.gone(1), "every group notices an end");
    require(Peers(pids).gone(1), "so does one that comes later");
  }
  require(descriptors() == before, "no descriptor is left");
  std::puts("ok");
}
