#include "engine/descriptor_server.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>

namespace pg_sdma {
namespace {

// Descriptors in one message: below the kernel's 253 (SCM_MAX_FD), and few enough that a receiver
// near its limit of open files still gets through, as each message is used up before the next.
constexpr size_t kMostAtOnce = 64;
constexpr timeval kPatience{5, 0};

struct Request {
  uint64_t export_id = 0;
  uint64_t first = 0;  // where no descriptors are asked for
  uint64_t count = 0;
  std::array<uint64_t, kMostAtOnce> serials{};  // 0 first: none
};

struct Reply {
  uint64_t count = 0;  // 0: refused
  Segment segment;
  union {
    std::array<Chunk, kMostAtOnce> chunks{};
    std::array<uint64_t, kMostAtOnce> bytes;
    char why[256];
  };
};

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // A leading zero byte: the abstract namespace, which leaves no file behind.
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int open_socket() {
  const int opened = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (opened < 0) fail("socket");
  return opened;
}

void set_patience(int connection) {
  setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
  setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
}

ucred peer_of(int connection) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) fail("SO_PEERCRED");
  return peer;
}

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(kMostAtOnce * sizeof(int))];
};

void send_reply(int connection, const Reply& reply, const std::vector<Descriptor>& descriptors) {
  iovec payload{const_cast<Reply*>(&reply), sizeof reply};
  Control control{};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    std::array<int, kMostAtOnce> numbers;
    std::transform(descriptors.begin(), descriptors.end(), numbers.begin(),
                   [](const Descriptor& descriptor) { return descriptor.number(); });
    const size_t size = descriptors.size() * sizeof(int);
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(header), numbers.data(), size);
  }
  // There is room for it: a peer asks again once it has the answer.
  if (sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) fail("sendmsg");
}

Reply receive_reply(int connection, bool asked, std::vector<Descriptor>& descriptors) {
  Reply reply{};
  iovec payload{&reply, sizeof reply};
  Control control{};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  ssize_t received = -1;
  do {
    received = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) fail("waiting for the peer's descriptors");
  size_t arrived = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++arrived) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof number);
      descriptors.emplace_back(number, reply.bytes[std::min(arrived, kMostAtOnce - 1)]);
    }
  }
  if (received != sizeof reply) throw std::runtime_error("the peer has closed the connection");
  if ((message.msg_flags & MSG_CTRUNC) != 0 ||
      (asked && reply.count > 0 && arrived != reply.count)) {
    throw std::runtime_error("descriptors were lost on the way (the limit of open files?)");
  }
  return reply;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

DescriptorServer::DescriptorServer(const std::string& name, Source source)
    : source_(std::move(source)),
      process_(getpid()),
      listener_(open_socket()),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  if (stop_.number() < 0) fail("eventfd");
  if (bind(listener_.number(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener_.number(), SOMAXCONN) != 0) {
    fail("listening for peers");
  }
  thread_ = std::thread([this] { serve(); });
}

DescriptorServer::~DescriptorServer() {
  if (getpid() != process_) {
    thread_.detach();  // after a fork it is the parent's: there is nothing to join here
    return;
  }
  const uint64_t one = 1;
  if (write(stop_.number(), &one, sizeof one) != sizeof one) std::terminate();
  thread_.join();
}

void DescriptorServer::serve() {
  // Signals are for the program's own threads.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  // A peer that has connected and is stopped before it asks holds up no other.
  std::vector<Descriptor> connections;
  for (;;) {
    std::vector<pollfd> events{{stop_.number(), POLLIN, 0}, {listener_.number(), POLLIN, 0}};
    for (const Descriptor& each : connections) events.push_back({each.number(), POLLIN, 0});
    if (poll(events.data(), events.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (events[0].revents != 0) return;
    std::vector<Descriptor> kept;
    for (size_t i = 0; i < connections.size(); ++i) {
      if (events[2 + i].revents == 0 || answered(connections[i].number())) {
        kept.push_back(std::move(connections[i]));
      }
    }
    connections.swap(kept);
    if (events[1].revents == 0) continue;
    Descriptor connection(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.number() < 0) {
      poll(events.data(), 1, 10);  // out of descriptors, maybe: the peer stays in the queue
      continue;
    }
    connections.push_back(std::move(connection));
  }
}

bool DescriptorServer::answered(int connection) {
  try {
    return answer(connection);
  } catch (const std::exception&) {
    return false;  // a peer that went away or asked nonsense learns by the closed connection
  }
}

// One request, which is there to be read. Whether more may follow.
bool DescriptorServer::answer(int connection) {
  if (peer_of(connection).uid != geteuid()) return false;
  Request request;
  if (recv(connection, &request, sizeof request, MSG_DONTWAIT) != sizeof request) return false;
  if (request.count == 0 || request.count > kMostAtOnce) return false;
  Reply reply{};
  std::vector<Descriptor> descriptors;
  try {
    if (request.serials[0] == 0) {
      const std::vector<Chunk> chunks =
          source_.chunks(request.export_id, request.first, request.count, reply.segment);
      reply.count = chunks.size();
      std::copy(chunks.begin(), chunks.end(), reply.chunks.begin());
    } else {
      descriptors = source_.descriptors(
          request.export_id, {request.serials.begin(), request.serials.begin() + request.count});
      reply.count = descriptors.size();
      for (size_t i = 0; i < descriptors.size(); ++i) reply.bytes[i] = descriptors[i].bytes();
    }
  } catch (const std::exception& error) {
    std::strncpy(reply.why, error.what(), sizeof reply.why - 1);
  }
  send_reply(connection, reply, descriptors);
  return true;
}

namespace {

Reply ask(int connection, const Request& request, std::vector<Descriptor>& descriptors) {
  if (send(connection, &request, sizeof request, MSG_NOSIGNAL) != sizeof request) {
    fail("asking the peer for its memory");
  }
  const Reply reply = receive_reply(connection, request.serials[0] != 0, descriptors);
  if (reply.count == 0) throw std::runtime_error(reply.why);
  if (reply.count != request.count)
    throw std::runtime_error("the peer sent less than it was asked");
  return reply;
}

}  // namespace

DescriptorClient::DescriptorClient(const std::string& name, pid_t process)
    : connection_(open_socket()) {
  const int connection = connection_.number();
  set_patience(connection);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    fail("reaching the peer that owns the memory");
  }
  const ucred peer = peer_of(connection);
  if (peer.pid != process || peer.uid != geteuid()) {
    throw std::runtime_error("the socket of process " + std::to_string(process) + " is process " +
                             std::to_string(peer.pid) + "'s");
  }
}

std::vector<Chunk> DescriptorClient::chunks(uint64_t export_id, size_t count, Segment& segment) {
  std::vector<Chunk> chunks;
  std::vector<Descriptor> none;
  while (chunks.size() < count) {
    Request request{export_id, chunks.size(), std::min(kMostAtOnce, count - chunks.size()), {}};
    const Reply reply = ask(connection_.number(), request, none);
    segment = reply.segment;
    chunks.insert(chunks.end(), reply.chunks.begin(), reply.chunks.begin() + reply.count);
  }
  return chunks;
}

void DescriptorClient::fetch(uint64_t export_id, const std::vector<uint64_t>& serials,
                             const std::function<void(const Descriptor&)>& take) {
  for (size_t taken = 0; taken < serials.size();) {
    Request request{export_id, 0, std::min(kMostAtOnce, serials.size() - taken), {}};
    std::copy_n(serials.begin() + taken, request.count, request.serials.begin());
    std::vector<Descriptor> descriptors;
    ask(connection_.number(), request, descriptors);
    for (const Descriptor& descriptor : descriptors) take(descriptor);
    taken += descriptors.size();
  }
}

}  // namespace pg_sdma
