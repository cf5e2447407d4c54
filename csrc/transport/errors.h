// What a transport throws.
#pragma once

#include <stdexcept>

namespace pg_sdma {

// A call's arguments are bad, or contradict a peer's. The group stays usable.
class BadCall : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The group is broken: a peer is gone or too late, or the group was aborted. Sticky.
class GroupFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace pg_sdma
