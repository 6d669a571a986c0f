# cython: language_level=3
"""Instruction sets of this machine, and threads for all kernels to share work with.

The calling thread takes shares until none is left, and then waits only for threads that are still
working on a share. It doesn't wait for a thread that sleeps because other processes have the cores.

Where torch is in use, the other threads are its OpenMP runtime's: they spin for milliseconds after
each of torch's operations, and threads of our own would wait for their cores. But a region of OpenMP
ends when all of its threads have come. After one that waited long for a thread without a share, the
threads are our own for a while.
"""

from cpython.pythread cimport (
    NOWAIT_LOCK,
    PyThread_acquire_lock,
    PyThread_allocate_lock,
    PyThread_free_lock,
    PyThread_release_lock,
    PyThread_start_new_thread,
    PyThread_type_lock,
    WAIT_LOCK,
)

cdef extern from *:
    """
    static int fusedops_level(void) {
    #ifdef FUSEDOPS_X86_64_LEVELS
        __builtin_cpu_init();
        if (__builtin_cpu_supports("x86-64-v4")) return 4;
        if (__builtin_cpu_supports("x86-64-v3")) return 3;
        if (__builtin_cpu_supports("x86-64-v2")) return 2;
        return 1;
    #else
        return 0;
    #endif
    }
    #if defined(_WIN32)
    /* Asked for OpenMP alone, which is not joined on Windows. */
    #define fusedops_now() 0LL
    #else
    #include <time.h>
    static long long fusedops_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return 1000000000LL * t.tv_sec + t.tv_nsec;
    }
    #endif
    #if defined(__GNUC__)
    #define fusedops_seen(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
    static inline long long fusedops_added(long long *at, long long n) {
        return __atomic_fetch_add(at, n, __ATOMIC_SEQ_CST);
    }
    static inline int fusedops_turned(long long *at, long long from, long long to) {
        return __atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    #else
    #include <intrin.h>
    #define fusedops_seen(at) _InterlockedOr64(at, 0)
    #define fusedops_added(at, n) _InterlockedExchangeAdd64(at, n)
    #define fusedops_turned(at, from, to) (_InterlockedCompareExchange64(at, to, from) == (from))
    #endif
    #if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
    #define fusedops_pause() __builtin_ia32_pause()
    #else
    #define fusedops_pause() ((void)0)
    #endif
    """
    int fusedops_level()
    long long now "fusedops_now"() nogil
    long long seen "fusedops_seen"(long long* at) nogil
    # Add to a number, and return its old value.
    long long added "fusedops_added"(long long* at, long long n) nogil
    # Set a number to `after` if it is `before`, and return whether it was.
    bint turned "fusedops_turned"(long long* at, long long before, long long after) nogil
    void pause "fusedops_pause"() nogil

cdef enum:
    MOST = 256
    # Shares for every thread: many, since the call waits for the last one to end.
    SHARES = 16
    # Looks at another thread's state before going to sleep: some 50 microseconds, as long as waking
    # up may take.
    LOOKS = 1000
    # In nanoseconds: how long a region of OpenMP may wait for threads without shares, and for how
    # long none is begun after a longer wait: the brief time, and after each such wait in a row twice
    # the time before, up to the long time.
    LATE = 300_000
    BRIEF = 10_000_000
    LONG = 1_000_000_000

# A worker's state. In any state but NONE and IDLE, only the call that claimed the worker changes it
# and, from OFFERED to RUNNING to DONE, the worker itself.
cdef enum:
    NONE
    IDLE
    CLAIMED
    OFFERED
    RUNNING
    AWAITED
    DONE

cdef struct Job:
    Share work
    const void* call
    Py_ssize_t items
    Py_ssize_t size
    long long taken
    long long threads
    long long most
    # When the last thread with a share ended.
    long long ended

cdef struct Worker:
    long long state
    Job* job
    PyThread_type_lock offered
    PyThread_type_lock done
    # Padding: one worker to a cache line.
    char[32] apart

cdef Worker[MOST] workers
# The threads that all calls have asked for help.
cdef long long helping

ctypedef void (*Region)(void* job) noexcept nogil
ctypedef void (*Parallel)(Region, void*, unsigned, unsigned) noexcept nogil
ctypedef int (*Number)() noexcept nogil
# The addresses of OpenMP's GOMP_parallel, or 0, and of its omp_get_max_threads.
cdef long long openmp, openmp_threads
# When OpenMP may be used again, and the time from its last long wait.
cdef long long away_until, away = BRIEF


cdef bint take_shares(Job* job) noexcept nogil:
    """Do shares until none is left; return whether there was one."""
    cdef int thread = <int>added(&job.threads, 1)
    cdef Py_ssize_t begin
    # OpenMP brings all of its threads.
    if thread >= job.most:
        return False
    begin = <Py_ssize_t>added(&job.taken, job.size)
    cdef bint some = begin < job.items
    while begin < job.items:
        job.work(job.call, begin, min(begin + job.size, job.items), thread)
        begin = <Py_ssize_t>added(&job.taken, job.size)
    return some


cdef void wait_while(Worker* worker, long long state) noexcept nogil:
    cdef int look
    for look in range(LOOKS):
        if seen(&worker.state) != state:
            return
        pause()


cdef void serve(void* given) noexcept nogil:
    cdef Worker* worker = <Worker*>given
    while True:
        wait_while(worker, DONE)
        wait_while(worker, IDLE)
        # The lock may still be open from an offer seen above; then this wakes once without an offer.
        if seen(&worker.state) != OFFERED:
            PyThread_acquire_lock(worker.offered, WAIT_LOCK)
        # An offer may have been withdrawn.
        if turned(&worker.state, OFFERED, RUNNING):
            take_shares(worker.job)
            if not turned(&worker.state, RUNNING, DONE):
                PyThread_release_lock(worker.done)


cdef bint start(Worker* worker) noexcept with gil:
    """Start a thread that waits for offers; return whether that worked."""
    worker.offered = PyThread_allocate_lock()
    worker.done = PyThread_allocate_lock()
    if worker.offered != NULL and worker.done != NULL:
        PyThread_acquire_lock(worker.offered, NOWAIT_LOCK)
        PyThread_acquire_lock(worker.done, NOWAIT_LOCK)
        if PyThread_start_new_thread(&serve, worker) != -1:
            return True
    if worker.offered != NULL:
        PyThread_free_lock(worker.offered)
    if worker.done != NULL:
        PyThread_free_lock(worker.done)
    return False


cdef bint claim(Worker* worker) noexcept nogil:
    if turned(&worker.state, NONE, CLAIMED):
        if start(worker):
            return True
        turned(&worker.state, CLAIMED, NONE)
        return False
    return turned(&worker.state, IDLE, CLAIMED)


cdef void collect(Worker* worker) noexcept nogil:
    """Take an offer back, or wait for its end."""
    if turned(&worker.state, OFFERED, IDLE):
        return
    wait_while(worker, RUNNING)
    if turned(&worker.state, RUNNING, AWAITED):
        PyThread_acquire_lock(worker.done, WAIT_LOCK)
        turned(&worker.state, AWAITED, IDLE)
    else:
        turned(&worker.state, DONE, IDLE)


cdef void with_workers(Job* job) noexcept nogil:
    cdef Worker* asked[MOST]
    cdef int count = 0, i
    for i in range(MOST):
        if count == job.most - 1:
            break
        if claim(&workers[i]):
            asked[count] = &workers[i]
            count += 1
            workers[i].job = job
            turned(&workers[i].state, CLAIMED, OFFERED)
            PyThread_release_lock(workers[i].offered)
    take_shares(job)
    for i in range(count):
        collect(asked[i])


cdef void in_region(void* given) noexcept nogil:
    cdef Job* job = <Job*>given
    if take_shares(job):
        turned(&job.ended, seen(&job.ended), now())


cdef void with_openmp(Job* job, Parallel parallel) noexcept nogil:
    global away, away_until
    job.ended = now()
    # Of as many threads as torch's regions have: for another number, the runtime would end threads
    # or begin some.
    parallel(&in_region, job, 0, 0)
    if now() - job.ended < LATE:
        away = BRIEF
    else:
        away_until = now() + away
        away = min(2 * away, <long long>LONG)


cdef void share(
    Share work, const void* call, Py_ssize_t items, Py_ssize_t size, int threads
) noexcept nogil:
    cdef Job job
    cdef Parallel parallel = <Parallel>seen(&openmp)
    # Calls at once, from several threads, together have the helpers of one.
    cdef long long others = added(&helping, threads - 1)
    cdef long long helpers = max(threads - 1 - others, <long long>0)
    added(&helping, helpers - (threads - 1))
    job.work = work
    job.call = call
    job.items = items
    job.size = max(size, <Py_ssize_t>1)
    job.taken = job.threads = 0
    job.most = helpers + 1
    if helpers == 0:
        work(call, 0, items, 0)
    elif (
        others == 0
        and parallel != NULL
        and (<Number>seen(&openmp_threads))() >= threads
        and now() > away_until
    ):
        with_openmp(&job, parallel)
    else:
        with_workers(&job)
    added(&helping, -helpers)


cdef void in_shares(
    Share work, const void* call, Py_ssize_t items, int threads
) noexcept nogil:
    """Do the items on this thread, and on up to threads - 1 others that join in time."""
    if threads <= 1:
        work(call, 0, items, 0)
    else:
        share(work, call, items, items // (SHARES * <Py_ssize_t>threads), threads)


cdef class _Calls:
    cdef object work
    cdef Py_ssize_t items
    cdef int parts
    cdef long long failed
    cdef object error


cdef void call_python(
    const void* call, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    with gil:
        calls = <_Calls>call
        if not seen(&calls.failed):
            try:
                calls.work(
                    calls.items * begin // calls.parts, calls.items * end // calls.parts
                )
            except BaseException as error:
                if added(&calls.failed, 1) == 0:
                    calls.error = error


def in_parallel(work, Py_ssize_t items, int threads):
    """Call ``work(low, high)`` on a share of the items for each thread, and raise its error."""
    cdef _Calls calls = _Calls()
    calls.work = work
    calls.items = items
    calls.parts = threads
    with nogil:
        share(call_python, <const void*>calls, threads, 1, threads)
    if calls.error is not None:
        raise calls.error


def join_openmp(size_t parallel, size_t max_threads):
    """Share work by OpenMP: by GOMP_parallel and omp_get_max_threads at these addresses, or not, 0."""
    global away, away_until
    away_until = 0
    away = BRIEF
    # Calls that run now may have seen the earlier addresses, so the second stays.
    if parallel:
        turned(&openmp_threads, seen(&openmp_threads), <long long>max_threads)
    turned(&openmp, seen(&openmp), <long long>parallel)


def x86_64_level():
    """Return N for x86-64-vN, or 0 if this build has a single, baseline module."""
    return fusedops_level()
