-- What a connection knew of a file when it last looked: unchanged means that its bytes need not be
-- read again. Opaque to the database; for a folder it is the size and the time of modification.
alter table files add column source_stamp text;
