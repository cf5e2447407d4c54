#include "transport/peers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace pg_sdma {

Peers::Peers(const std::vector<int>& pids) : pids_(pids), descriptors_(pids.size(), -1) {
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    descriptors_[rank] = static_cast<int>(syscall(SYS_pidfd_open, pids[rank], 0));
    // The process ended before we could hold it: remember that as a descriptor that cannot be.
    if (descriptors_[rank] < 0 && errno == ESRCH) descriptors_[rank] = -2;
  }
}

Peers::~Peers() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

bool Peers::gone(int rank) const {
  const int descriptor = descriptors_[rank];
  if (descriptor < 0) return descriptor == -2;
  pollfd ended{descriptor, POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

}  // namespace pg_sdma
