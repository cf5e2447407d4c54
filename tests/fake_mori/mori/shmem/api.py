"""mori.shmem, of which pg_sdma uses the bootstrap."""

from mori import cpp as mori_cpp

MORI_SHMEM_INIT_WITH_MPI_COMM = mori_cpp.MORI_SHMEM_INIT_WITH_MPI_COMM
MORI_SHMEM_INIT_WITH_UNIQUEID = mori_cpp.MORI_SHMEM_INIT_WITH_UNIQUEID

_shmem_module_loaded_gpus: set = set()


def shmem_get_unique_id() -> bytes:
    return mori_cpp.shmem_get_unique_id()


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes):
    _shmem_module_loaded_gpus.add(0)
    return mori_cpp.shmem_init_attr(flags, rank, nranks, unique_id)


def shmem_torch_process_group_init(group_name: str):
    raise AssertionError("a collective of c10d's, inside of the creation of a group")


def shmem_mype() -> int:
    return mori_cpp.shmem_mype()


def shmem_npes() -> int:
    return mori_cpp.shmem_npes()
