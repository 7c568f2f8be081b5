// The archive of kernels as bytes of the library. STILL_ARCHIVE is the file's path, or undefined.
    .section .rodata
    .balign 16
    .globl still_archive_begin
    .hidden still_archive_begin
still_archive_begin:
#ifdef STILL_ARCHIVE
    .incbin STILL_ARCHIVE
#endif
    .globl still_archive_end
    .hidden still_archive_end
still_archive_end:
    .byte 0
    .section .note.GNU-stack,"",%progbits
